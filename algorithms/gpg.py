"""Group Policy Gradient, GPG (Chu et al. 2025).

The plain policy gradient. The advantage is the score minus its group's mean, not divided by the deviation.
There is no ratio, clip or KL. Groups with equal scores have no gradient; `alpha` scales up the other groups
to compensate. Difference from the paper: truncated importance weights correct the mismatch between sampler
and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import RANK0, flow, group_mean, group_std, loss, stage, truncated_weights


@dataclass(frozen=True)
class GPG:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages", dispatch=RANK0)  # alpha needs the complete batch
def compare(scores, group, mask):
    """Return alpha (score - group's mean), where alpha = rows / (rows in groups with unequal scores) (eq. 9).
    The update skips a row whose score is missing (NaN)."""
    there = scores.isfinite()
    unequal = there & (group_std(scores, group) > 0)
    alpha = there.sum().double() / unequal.sum().clamp(min=1)
    # in the dtype of the scores: alpha is one number
    advantage = alpha * (scores - group_mean(scores, group))
    return torch.where(mask, advantage[:, None], 0.0), {"alpha": alpha}


@loss
def policy_loss(new, advantages, weights):
    return -weights * advantages * new.logprobs, {}


@flow
def gpg(prompts, actor, reward, hp=GPG()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    actor.update(batch, policy_loss, minibatch=hp.minibatch)
