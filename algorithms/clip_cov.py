"""Clip-Cov, and with `form="kl"` KL-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning").

GRPO with a restraint on the few tokens whose log-prob and advantage have a high covariance. These tokens
lower the entropy most. Clip-Cov draws some of them at random and gives them no gradient. KL-Cov takes the
tokens with the highest covariance and adds a KL penalty to them, without a clip. Differences from the paper:
the tokens are chosen once for all rows of an iteration, from the log-probs before its first optimizer step.
Truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    RANK0,
    clipped_gain,
    compare,
    drawn_tokens,
    flow,
    largest_tokens,
    loss,
    stage,
    token,
    token_covariance,
    truncated_weights,
)


@dataclass(frozen=True)
class ClipCov:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    form: Literal["clip", "kl"] = "clip"  # restrained tokens get no gradient ("clip"), or a penalty ("kl")
    # largest share of all tokens to restrain; at least one token, and none at 0
    share: Annotated[float, Ge(0), Le(1)] = 2e-4
    cov_low: float = 1.0  # "clip": tokens are drawn whose covariance is above this
    cov_high: float = 5.0  # and below this
    beta: Annotated[float, Ge(0)] = 1.0  # "kl": penalty per nat of change in a restrained token's log-prob
    clip: Annotated[float, Gt(0)] = 0.2  # "clip": trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"held": token(torch.bool)}, dispatch=RANK0)  # means and ranks are over the whole batch
def hold(logprobs, advantages, mask, *, form, share, low, high, generator):
    covariance = token_covariance(logprobs, advantages, mask)
    count = max(int(share * int(mask.sum())), 1 if share else 0)
    between = mask & (covariance > low) & (covariance < high)
    held = (
        largest_tokens(covariance, mask, count) if form == "kl" else drawn_tokens(between, count, generator)
    )
    return held, {"held": held.float(), "covariance_max": covariance}


@loss
def policy_loss(new, logprobs, advantages, weights, held, *, form, clip, beta):
    log_ratio = new.logprobs - logprobs
    ratio = log_ratio.exp()
    if form == "kl":
        return torch.where(held, beta * log_ratio.abs(), 0.0) - weights * ratio * advantages, {}
    gain = torch.where(held, 0.0, clipped_gain(ratio, advantages, clip, clip))
    return -weights * gain, {"clipped": (ratio - 1).abs() > clip}


@flow
def clip_cov(prompts, actor, reward, hp=ClipCov()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    batch |= hold(batch, form=hp.form, share=hp.share, low=hp.cov_low, high=hp.cov_high)
    actor.update(
        batch, policy_loss, form=hp.form, clip=hp.clip, beta=hp.beta, epochs=hp.epochs, minibatch=hp.minibatch
    )
