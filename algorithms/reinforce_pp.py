"""REINFORCE++ (Hu 2025), and with `baseline` REINFORCE++-baseline.

REINFORCE with PPO's clip, a KL charge on each token, and returns whitened over all tokens of the batch
instead of a critic. `baseline=True` first takes the group's mean off the scores, without its deviation.
Differs from the paper in the truncated weights between sampler and trainer (Yao et al. 2025), and in charging
k1 in the reward with the baseline as well.
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
    baseline: bool = False  # take the group's mean off the scores
    beta: Annotated[float, Ge(0)] = 0.01  # price of one nat of KL to the reference; 0 needs no reference
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # discount per token
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # truncation of the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="scores", rows="group")
def centre(scores, group):
    return scores - group_mean(scores, group)


@stage(gives="rewards")
# an optional column: absent when beta is 0
def charge_kl(scores, logprobs, mask, ref_logprobs=None, *, beta):
    charge = 0 if ref_logprobs is None else beta * kl(logprobs, ref_logprobs, "k1")
    return place_last(scores, mask) - torch.where(mask, charge, 0.0)


@stage(gives="advantages", dispatch=RANK0)  # mean and deviation are over the whole batch
def normalised_returns(rewards, mask, *, gamma):
    """Rewards to go, whitened. A missing score (NaN) leaves its row out of the statistics and of the
    update."""
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
