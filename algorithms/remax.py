"""ReMax (Li et al. 2024): REINFORCE with the score of the greedy response as baseline.

The policy samples one response and one greedy response per prompt. There is no critic, and there are no
groups. Differences from the authors' code: as in the paper, a token's KL penalty also counts for the tokens
before it. A clipped ratio allows several optimizer steps; it does not change the first. Truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import clipped_gain, flow, kl, loss, place_last, reward_to_go, row, stage, truncated_weights


@dataclass(frozen=True)
class ReMax:
    samples: Annotated[int, Ge(1)] = 1  # responses per prompt, in addition to the greedy one
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    beta: Annotated[float, Ge(0)] = 0.05  # KL coefficient, per nat; 0 needs no reference
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # discount per token
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="rewards")
# ref_logprobs is optional: absent when beta is 0
def charge_kl(scores, logprobs, mask, ref_logprobs=None, *, beta):
    charge = 0 if ref_logprobs is None else beta * kl(logprobs, ref_logprobs, "k1")
    return place_last(scores, mask) - torch.where(mask, charge, 0.0)


@stage(gives="advantages")
def compare(rewards, baseline: row(torch.float32), mask, *, gamma):
    """Return the discounted reward-to-go of each token, minus the score of the greedy response. If the score
    of either response is missing (NaN), the update skips the row."""
    return torch.where(mask, reward_to_go(rewards, mask, gamma) - baseline[:, None], 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def remax(prompts, actor, reference, reward, hp=ReMax()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    greedy = actor.generate(prompts, max_tokens=hp.max_tokens, temperature=0.0)
    batch |= reward(batch)
    batch |= reward(greedy, gives="baseline")
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= charge_kl(batch, beta=hp.beta)
    batch |= compare(batch, gamma=hp.gamma)
    actor.update(
        batch, policy_loss, clip=hp.clip, mean=hp.max_tokens, epochs=hp.epochs, minibatch=hp.minibatch
    )
