"""Group Sequence Policy Optimization, GSPO (Zheng et al. 2025).

GRPO's advantages with one ratio per response, the geometric mean of its tokens' ratios. The clip range is
narrow because such means stay close to 1. The loss is written as GSPO-token (eq. 14), which has the same
gradient. Difference from the paper: truncated importance weights correct the mismatch between sampler and
trainer for each token (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import clipped_gain, compare, flow, loss, row_mean, truncated_weights


@dataclass(frozen=True)
class GSPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip_low: Annotated[float, Gt(0)] = 3e-4  # the ratio of a response is clipped at 1 - clip_low
    clip_high: Annotated[float, Gt(0)] = 4e-4  # and at 1 + clip_high
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def policy_loss(new, logprobs, advantages, weights, mask, *, low, high):
    fixed = new.logprobs.detach()
    # mean over the response; the gradient flows through each token
    log_ratio = row_mean(fixed - logprobs, mask)[:, None]
    ratio = (log_ratio.clamp(max=10) + new.logprobs - fixed).exp()
    clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return -weights * clipped_gain(ratio, advantages, low, high), {"clipped": clipped}


@flow
def gspo(prompts, actor, reward, hp=GSPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    actor.update(
        batch,
        policy_loss,
        low=hp.clip_low,
        high=hp.clip_high,
        mean="row-tokens",
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
