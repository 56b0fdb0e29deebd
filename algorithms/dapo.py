"""Decoupled Clip and Dynamic Sampling Policy Optimization, DAPO (Yu et al. 2025).

GRPO without KL, with a larger upper clip bound, a soft penalty for responses near the maximum length, and the
loss averaged over all tokens. Dynamic sampling (`repeat`) replaces groups with equal scores by sampling new
groups. The scores are compared before the length penalty. Difference from the paper: truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import clipped_gain, compare, flow, group_std, loss, repeat, stage, truncated_weights


@dataclass(frozen=True)
class DAPO:
    samples: Annotated[int, Ge(2)] = 16  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 20480  # longest response
    groups: Annotated[int, Ge(1)] = 64  # groups with unequal scores to train on in each iteration
    tries: Annotated[int, Ge(1)] = 10  # how often an iteration may draw prompts to find these groups
    # the penalty grows over this many tokens before max_tokens; 0: no penalty
    overlong: Annotated[int, Ge(0)] = 4096
    penalty: Annotated[float, Ge(0)] = 1.0  # penalty of a response of max_tokens tokens
    clip_low: Annotated[float, Gt(0)] = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: Annotated[float, Gt(0)] = 0.28  # and at 1 + clip_high
    # dual clip: cap on the ratio at negative advantages (Ye et al. 2020); None: no cap
    dual_clip: Annotated[float, Gt(1)] | None = None
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 512  # rows per optimizer step, over all ranks


@stage(gives="keep", rows="group")
def mixed(scores, group):
    """Return whether the scores of each row's group differ by more than rounding error. Smaller differences
    carry no signal, and dividing by their deviation would amplify the error."""
    return group_std(scores, group) > 1e-6


@stage(gives="scores")
def shorten(scores, mask, *, max_tokens, overlong, penalty):
    """Subtract the soft over-long punishment (eq. 13) from the scores. It rises linearly from 0 at
    `max_tokens - overlong` tokens to `penalty` at `max_tokens`."""
    excess = (mask.sum(1) - (max_tokens - overlong)).to(scores.dtype) / overlong
    return scores - penalty * excess.clamp(0, 1)


@loss
def policy_loss(new, logprobs, advantages, weights, *, low, high, dual=None):
    ratio = (new.logprobs - logprobs).exp()
    clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return -weights * clipped_gain(ratio, advantages, low, high, dual), {"clipped": clipped}


@flow
def dapo(prompts, actor, reward, hp=DAPO()):
    def sampled(prompts):
        batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
        batch |= reward(batch)
        return batch | mixed(batch)

    batch = repeat(sampled, prompts, groups=hp.groups, tries=hp.tries)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.overlong:
        batch |= shorten(batch, max_tokens=hp.max_tokens, overlong=hp.overlong, penalty=hp.penalty)
    batch |= compare(batch)
    actor.update(
        batch,
        policy_loss,
        low=hp.clip_low,
        high=hp.clip_high,
        dual=hp.dual_clip,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
