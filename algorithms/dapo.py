"""Decoupled Clip and Dynamic Sampling Policy Optimization (Yu et al. 2025).

GRPO with a wider clip upwards, groups of equal scores replaced by fresh ones (dynamic sampling, `repeat`), a
soft penalty for responses near the longest length, the mean over all tokens, and no KL. Differs from the
paper in the truncated weights between sampler and trainer (Yao et al. 2025). A group is judged mixed by its
scores before the penalty.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import clipped_gain, compare, flow, group_std, loss, repeat, stage, truncated_weights


@dataclass(frozen=True)
class DAPO:
    samples: Annotated[int, Ge(2)] = 16  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 20480  # longest response
    groups: Annotated[int, Ge(1)] = 64  # mixed groups to train on in each iteration
    tries: Annotated[int, Ge(1)] = 10  # how often prompts are drawn for them at most
    # the last tokens before max_tokens, over which the penalty grows; 0 is none
    overlong: Annotated[int, Ge(0)] = 4096
    penalty: Annotated[float, Ge(0)] = 1.0  # at max_tokens
    clip_low: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio downwards
    clip_high: Annotated[float, Gt(0)] = 0.28  # and upwards
    # largest ratio on a negative advantage (Ye et al. 2020); None: any
    dual_clip: Annotated[float, Gt(1)] | None = None
    is_cap: Annotated[float, Gt(0)] = 2.0  # truncation of the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 512  # rows per optimizer step, over all ranks


@stage(gives="keep", rows="group")
def mixed(scores, group):
    """A deviation as small as rounding teaches nothing and would be blown up by the division."""
    return group_std(scores, group) > 1e-6


@stage(gives="scores")
def shorten(scores, mask, *, max_tokens, overlong, penalty):
    """Soft over-long punishment (eq. 13), from 0 at max_tokens - overlong tokens down to -penalty at
    max_tokens and beyond."""
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
