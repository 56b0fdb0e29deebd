"""Completion Pruning Policy Optimization, CPPO (Lin et al. 2025).

GRPO that trains only on the responses of each group with the largest absolute advantages. The other responses
would change the policy little. They are dropped before the trainer computes log-probs, which saves time.
Differences from the paper: the loss is the mean over all tokens (in the paper, over each response first), and
has no KL term. Truncated importance weights correct the mismatch between sampler and trainer (Yao et al.
2025). The freed places are not filled with more prompts (dynamic allocation); use a larger `--prompts`.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import choose, clipped_gain, compare, flow, loss, row, stage, truncated_weights


@dataclass(frozen=True)
class CPPO:
    samples: Annotated[int, Ge(2)] = 16  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    # responses of each group to train on: the ones with the largest absolute advantage
    kept: Annotated[int, Ge(1)] = 4
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"magnitude": row("float32")})
def magnitude(advantages, mask):
    """Return the absolute advantage of each response. All tokens of a response have the same advantage.
    Returns NaN for a row with a missing score. Such a row never counts as one of the largest."""
    return torch.where(mask, advantages.abs(), 0.0).amax(1)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def cppo(prompts, actor, reward, hp=CPPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= compare(batch)
    batch = choose(batch | magnitude(batch), top="magnitude", count=hp.kept, per="group")
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
