"""Tapered Off-Policy REINFORCE, TOPR (Le Roux et al. 2025).

Responses with a positive reward are learned by maximum likelihood, regardless of the ratio between policy and
sampler. Responses with a negative reward are weighted by this ratio, capped at 1. The update therefore does
not push down responses that have already become unlikely (section 3). There is no clip and no reference. The
ratio is computed for complete responses from the sampler's own log-probs, so rows from older policies can be
used. The baseline is a constant, which sets the relative weight of right and wrong responses. Difference from
the paper: every iteration learns from new rows.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from rlflow import flow, loss, row_sum, stage


@dataclass(frozen=True)
class TOPR:
    samples: Annotated[int, Ge(1)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    baseline: float = 0.5  # subtracted from each score; the difference is the reward
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages")
def relative(scores, mask, *, baseline):
    return torch.where(mask, (scores - baseline)[:, None], 0.0), {"right": (scores > baseline).float()}


@loss
def policy_loss(new, sampled_logprobs, advantages, mask):
    log_ratio = row_sum(new.logprobs.detach() - sampled_logprobs, mask)[:, None]  # of the complete response
    taper = torch.where(advantages < 0, log_ratio.clamp(max=0).exp(), 1.0)
    return -taper * advantages * new.logprobs, {"taper": torch.where(advantages < 0, taper, torch.nan)}


@flow
def topr(prompts, actor, reward, hp=TOPR()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= relative(batch, baseline=hp.baseline)
    actor.update(batch, policy_loss, mean=hp.max_tokens, epochs=hp.epochs, minibatch=hp.minibatch)
