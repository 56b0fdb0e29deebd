"""Tapered Off-Policy REINFORCE, TOPR (Le Roux et al. 2025).

No clip and no reference: responses with a positive reward are learnt by their likelihood, whatever the ratio
between the policy and the sampler, and those with a negative one are weighed by that ratio, at most 1, so
that what has become unlikely is pushed down no further (section 3). The ratio is of whole responses, and to
the sampler's own log-probs, so that rows may be old. The baseline is a constant, which says how much right
and wrong responses weigh. Differs from the paper in learning in every iteration from rows of its own.
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
    baseline: float = 0.5  # taken off each score; what is left over is the reward
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages")
def relative(scores, mask, *, baseline):
    return torch.where(mask, (scores - baseline)[:, None], 0.0), {"right": (scores > baseline).float()}


@loss
def policy_loss(new, sampled_logprobs, advantages, mask):
    log_ratio = row_sum(new.logprobs.detach() - sampled_logprobs, mask)[:, None]  # of the whole response
    taper = torch.where(advantages < 0, log_ratio.clamp(max=0).exp(), 1.0)
    return -taper * advantages * new.logprobs, {"taper": torch.where(advantages < 0, taper, torch.nan)}


@flow
def topr(prompts, actor, reward, hp=TOPR()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= relative(batch, baseline=hp.baseline)
    actor.update(batch, policy_loss, mean=hp.max_tokens, epochs=hp.epochs, minibatch=hp.minibatch)
