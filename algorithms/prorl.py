"""ProRL, Prolonged Reinforcement Learning (Liu et al. 2025).

GRPO with a KL term whose reference is reset: every `reset` iterations, the reference becomes a copy of the
policy, and the optimizer forgets its moments. The clipping has the upper bound of DAPO (Yu et al. 2025).
Differences from the paper: resets follow a schedule, while the authors reset when the held-out accuracy
stagnates. The paper's penalty on long responses and its dynamic sampling aren't included. Truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt

from rlflow import (
    RANK0,
    clipped_gain,
    compare,
    flow,
    follow,
    kl_penalty,
    loss,
    scalar,
    stage,
    truncated_weights,
)


@dataclass(frozen=True)
class ProRL:
    reset: Annotated[int, Ge(1)] = 200  # iterations between resets of reference and optimizer
    beta: Annotated[float, Ge(0)] = 0.0001  # KL coefficient in the loss; 0 needs no reference
    # KL estimator; gradient of k2: right on-policy, k3: forward KL, k3-weighted: right off-policy too
    estimator: Literal["k2", "k3", "k3-weighted"] = "k2"
    samples: Annotated[int, Ge(2)] = 16  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 8192  # longest response
    temperature: Annotated[float, Gt(0)] = 1.2  # of sampling
    clip_low: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio, below 1
    clip_high: Annotated[float, Gt(0)] = 0.4  # trust region of the policy ratio, above 1
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"restart": scalar(torch.bool)}, dispatch=RANK0)
def begins(iteration, *, reset):
    """Return True in the first iteration after each reset of the reference."""
    return (iteration > 0) & (iteration % reset == 0)


@loss
def policy_loss(
    new, logprobs, advantages, weights, ref_logprobs=None, *, clip_low, clip_high, beta, estimator="k2"
):
    ratio = (new.logprobs - logprobs).exp()
    charge = 0 if ref_logprobs is None else beta * kl_penalty(new.logprobs, logprobs, ref_logprobs, estimator)
    return charge - weights * clipped_gain(ratio, advantages, clip_low, clip_high), {
        "clipped": (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    }


@flow(keeps=lambda hp: {"reference": follow("actor", every=hp.reset, after=hp.reset - 1)})
def prorl(prompts, actor, reference, reward, hp=ProRL()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens, temperature=hp.temperature)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= compare(batch)
    batch |= begins(batch, reset=hp.reset)
    actor.update(
        batch,
        policy_loss,
        clip_low=hp.clip_low,
        clip_high=hp.clip_high,
        beta=hp.beta,
        estimator=hp.estimator,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
        fresh_optimizer="restart",
    )
