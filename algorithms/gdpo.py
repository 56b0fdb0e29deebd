"""Group reward-Decoupled Normalization Policy Optimization, GDPO (Liu et al. 2026).

GRPO for several rewards. Each reward's scores are normalised separately within their group. The weighted sum
of the resulting advantages is whitened over the batch. (If the rewards were summed first, different
combinations with equal sums would get equal advantages.) Each `--reward X:WEIGHT` is a separate role. WEIGHT
scales the advantages of X, because normalising removes any factor of the scores. With one reward, this is
GRPO with whitened advantages. Differences from the paper: the loss is the mean over all tokens, and has no KL
term. Truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import RANK0, clipped_gain, compare, flow, loss, stage, truncated_weights, whiten


@dataclass(frozen=True)
class GDPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages")
def weigh(of_reward, *, weight):
    return weight * of_reward


@stage(gives="advantages")
def add(advantages, of_reward, *, weight):
    """Add the advantages of one more reward, multiplied by its weight. If a row's score is missing (NaN) for
    any reward, the update skips the row."""
    return advantages + weight * of_reward


@stage(gives="advantages", dispatch=RANK0)
def over_the_batch(advantages, mask):
    return torch.where(mask, whiten(advantages, mask), 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def gdpo(prompts, actor, *rewards, hp=GDPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    for number, reward in enumerate(rewards):
        batch |= reward(batch)
        batch |= compare(batch, gives="of_reward")
        batch |= add(batch, weight=reward.weight) if number else weigh(batch, weight=reward.weight)
    batch |= over_the_batch(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
