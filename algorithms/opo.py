"""On-Policy RL with Optimal Baseline, OPO (Hao et al. 2025).

A group's baseline is the mean of its scores, weighted by response length. It minimises the variance if a
response's gradient grows with its length. OPO is exactly on-policy: each iteration takes one optimizer step
over all its rows, without ratio, clip or KL. Differences from the paper: truncated importance weights correct
the mismatch between sampler and trainer (Yao et al. 2025). The sum over a response's tokens is divided by the
constant max_tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import flow, length_weighted_mean, loss, stage, truncated_weights


@dataclass(frozen=True)
class OPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer


@stage(gives="advantages", rows="group")
def compare(scores, group, mask):
    """Return each score minus its group's length-weighted mean, at each token. The update skips a row whose
    score is missing (NaN)."""
    advantage = scores - length_weighted_mean(scores, mask.sum(1), group)
    return torch.where(mask, advantage[:, None], 0.0)


@loss
def policy_loss(new, advantages, weights):
    return -weights * advantages * new.logprobs, {}


@flow
def opo(prompts, actor, reward, hp=OPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    actor.update(batch, policy_loss, mean=hp.max_tokens)
