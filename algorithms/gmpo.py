"""Geometric-Mean Policy Optimization, GMPO (Zhao et al. 2025).

GRPO's advantages with one ratio per response, the geometric mean of its tokens' ratios, as in GSPO. Unlike in
GSPO, each token's ratio is clipped in log space before the mean is taken, and only if the clip lowers the
gain. A single outlier therefore cannot dominate its response. Difference from the paper: truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025). A response's weight is the mean of
its tokens' weights.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import compare, flow, geometric_gain, loss, row_mean, truncated_weights


@dataclass(frozen=True)
class GMPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip_low: Annotated[float, Gt(0)] = 0.4  # a token's log-ratio is clipped at -clip_low
    clip_high: Annotated[float, Gt(0)] = 0.4  # and at clip_high
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def policy_loss(new, logprobs, advantages, weights, mask, *, low, high):
    log_ratio = new.logprobs - logprobs
    clipped = torch.where(advantages > 0, log_ratio > high, log_ratio < -low)
    return -row_mean(weights, mask) * geometric_gain(log_ratio, advantages, mask, low, high), {
        "clipped": clipped
    }


@flow
def gmpo(prompts, actor, reward, hp=GMPO()):
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
        mean="rows",
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
