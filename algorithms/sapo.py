"""Soft Adaptive Policy Optimization, SAPO (Gao et al. 2025).

GRPO with a smooth gate around a ratio of 1 instead of the clip. A token's gradient shrinks gradually instead
of being cut off at a bound. The gate is sharper for tokens with a negative advantage. Difference from the
paper: truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import compare, flow, loss, truncated_weights


@dataclass(frozen=True)
class SAPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    tau_pos: Annotated[float, Gt(0)] = 1.0  # sharpness of the gate for positive advantages
    tau_neg: Annotated[float, Gt(0)] = 1.05  # and for all others
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def policy_loss(new, logprobs, advantages, weights, *, tau_pos, tau_neg):
    ratio = (new.logprobs - logprobs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio)
    gate = 4 / tau * (tau * (ratio - 1)).sigmoid()  # slope 1 at a ratio of 1, smaller on both sides
    return -weights * gate * advantages, {"ratio_max": ratio}


@flow
def sapo(prompts, actor, reward, hp=SAPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    actor.update(
        batch,
        policy_loss,
        tau_pos=hp.tau_pos,
        tau_neg=hp.tau_neg,
        mean="row-tokens",
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
