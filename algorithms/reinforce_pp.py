"""REINFORCE++ (Hu 2025), and with `baseline=True` REINFORCE++-baseline.

REINFORCE with PPO's clip and a KL penalty on each token. Returns are whitened over all tokens of the batch;
there is no critic. With `baseline=True`, the group's mean is first subtracted from the scores, without
dividing by the deviation. Differences from the paper: truncated importance weights correct the mismatch
between sampler and trainer (Yao et al. 2025). With and without the baseline, the KL penalty is part of the
reward and is estimated by k1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    RANK0,
    clipped_gain,
    flow,
    group_mean,
    kl,
    loss,
    place_last,
    reward_to_go,
    stage,
    truncated_weights,
    whiten,
)


@dataclass(frozen=True)
class ReinforcePP:
    samples: Annotated[int, Ge(1)] = 4  # responses per prompt; 1 is enough without the baseline
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    baseline: bool = False  # subtract the group's mean from the scores
    beta: Annotated[float, Ge(0)] = 0.01  # KL coefficient, per nat; 0 needs no reference
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # discount per token
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="scores", rows="group")
def centre(scores, group):
    return scores - group_mean(scores, group)


@stage(gives="rewards")
# ref_logprobs is optional: absent when beta is 0
def charge_kl(scores, logprobs, mask, ref_logprobs=None, *, beta):
    charge = 0 if ref_logprobs is None else beta * kl(logprobs, ref_logprobs, "k1")
    return place_last(scores, mask) - torch.where(mask, charge, 0.0)


@stage(gives="advantages", dispatch=RANK0)  # mean and deviation need the complete batch
def normalised_returns(rewards, mask, *, gamma):
    """Return the discounted reward-to-go of each token, whitened over all rows. A row with a missing score
    (NaN) is excluded from the mean and deviation, and from the update."""
    return whiten(reward_to_go(rewards, mask, gamma), mask)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def reinforce_pp(prompts, actor, reference, reward, hp=ReinforcePP()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.baseline:
        batch |= centre(batch)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= charge_kl(batch, beta=hp.beta)
    batch |= normalised_returns(batch, gamma=hp.gamma)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
