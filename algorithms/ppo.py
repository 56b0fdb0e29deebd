"""Proximal Policy Optimization, PPO, for language models (Schulman et al. 2017; Ouyang et al. 2022).

Token-level PPO with a learned critic, GAE, whitened advantages, and a KL penalty in the reward (estimator
k1). Differences from the papers: truncated importance weights correct the mismatch between sampler and
trainer (Yao et al. 2025). Advantages are whitened over all rows of the iteration.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    DP_COMPUTE,
    RANK0,
    clipped_gain,
    flow,
    gae,
    kl,
    loss,
    place_last,
    stage,
    truncated_weights,
    whiten,
)


@dataclass(frozen=True)
class PPO:
    samples: Annotated[int, Ge(1)] = 1  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    beta: Annotated[float, Ge(0)] = 0.05  # KL coefficient, per nat; 0 needs no reference
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # discount per token
    lam: Annotated[float, Ge(0), Le(1)] = 0.95  # GAE: 0 trusts the critic, 1 trusts the return
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    # upper clip bound, if it differs from the lower (Yu et al. 2025); None: as clip
    clip_high: Annotated[float, Gt(0)] | None = None
    # dual clip: cap on the ratio at negative advantages (Ye et al. 2020); None: no cap
    dual_clip: Annotated[float, Gt(1)] | None = None
    value_clip: Annotated[float, Gt(0)] = 0.5  # how far a value may move from the old one in one iteration
    # the value loss is linear in errors above this (Huber 1964); None: always quadratic
    value_huber: Annotated[float, Gt(0)] | None = None
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    warmup: Annotated[int, Ge(0)] = 0  # number of first iterations that train only the critic
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks


@stage(gives="rewards", dispatch=DP_COMPUTE)
def charge_kl(scores, logprobs, mask, ref_logprobs=None, *, beta):  # absent when beta is 0
    charge = 0 if ref_logprobs is None else beta * kl(logprobs, ref_logprobs, "k1")
    return place_last(scores, mask) - torch.where(mask, charge, 0.0)


@stage(gives="advantages", dispatch=RANK0)  # mean and deviation need the complete batch
def normalise(advantages, mask):
    return whiten(advantages, mask)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip, high=None, dual=None):
    ratio, high = (new.logprobs - logprobs).exp(), clip if high is None else high
    clipped = (ratio < 1 - clip) | (ratio > 1 + high)
    return -weights * clipped_gain(ratio, advantages, clip, high, dual), {"clipped": clipped}


@loss(new="values")
def value_loss(new, values, returns, *, clip, huber=None):
    near = values + (new.values - values).clamp(-clip, clip)
    error = torch.max((new.values - returns).abs(), (near - returns).abs())
    square = 0.5 * error.square()
    return square if huber is None else torch.where(error <= huber, square, huber * (error - 0.5 * huber)), {}


@flow
def ppo(prompts, actor, critic, reference, reward, hp=PPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= critic.values(batch)
    batch |= charge_kl(batch, beta=hp.beta)
    batch |= gae(batch, gamma=hp.gamma, lam=hp.lam)
    batch |= normalise(batch)
    passes = {"epochs": hp.epochs, "minibatch": hp.minibatch}
    critic.update(batch, value_loss, clip=hp.value_clip, huber=hp.value_huber, **passes)
    clips = {"clip": hp.clip, "high": hp.clip_high, "dual": hp.dual_clip}
    actor.update(batch, policy_loss, **clips, **passes, after=hp.warmup)
