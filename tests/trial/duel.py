"""A duel: two policies answer the same questions, and each is rewarded for scoring more than the other."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from rlflow import flow, group, group_mean, loss, stage, truncated_weights


@dataclass(frozen=True)
class Duel:
    samples: Annotated[int, Ge(1)] = 4  # responses of each policy to each question
    max_tokens: Annotated[int, Ge(1)] = 8  # longest response
    minibatch: Annotated[int, Ge(1)] = 16  # rows per optimizer step


@stage(gives={"level": group(torch.float32)}, rows="group")
def level(scores, group):
    return group_mean(scores, group)


@stage(gives="advantages")
def ahead(scores, rival, mask):
    """Return how much a response scores above the mean of the other policy on the question."""
    lead = scores - rival
    return torch.where(mask, lead[:, None], 0.0), {"won": (lead > 0).float()}


@loss
def policy_loss(new, logprobs, advantages, weights):
    return -weights * (new.logprobs - logprobs).exp() * advantages


@flow
def duel(prompts, left, right, reward, hp=Duel()):
    sides = [
        player.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens) for player in (left, right)
    ]
    sides = [side | reward(side) for side in sides]
    levels = [level(side, gives="rival") for side in sides]
    for player, side, rival in zip((left, right), sides, reversed(levels), strict=True):
        side |= rival  # one value per question, from the other policy's responses
        side |= ahead(side)
        side |= player.logprobs(side)
        side |= truncated_weights(side, cap=2.0)
        player.update(side, policy_loss, minibatch=hp.minibatch)
