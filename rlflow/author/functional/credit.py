"""Credit assignment: which token gets which reward or advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.stage import stage


def place_last(scores: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards [rows, T]: each row's score at the last True of its mask, 0 elsewhere.

    scores: [rows]. mask: bool [rows, T]. A row without a True gets only zeros.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1, keepdim=True) if mask.shape[1] else places[None]
    return torch.where(
        (places == last) & mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device)
    )


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return each token's discounted sum of its own and later rewards, [rows, T]; 0 outside the mask.

    rewards and mask are [rows, T]. Only tokens under the mask count as steps, so a masked-out token adds no
    discount.
    """
    returns, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, t], rewards[:, t] + gamma * ahead, ahead)
        returns[:, t] = torch.where(mask[:, t], ahead, 0.0)
    return returns


@stage(gives=("advantages", "returns"))
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of generalised advantage estimation, both [rows, T].

    rewards, values and mask are [rows, T]. returns = advantages + values. Masked-out tokens, such as tool
    output, are not steps: the advantage and the next value pass over them without a discount.

    Source: Schulman et al. 2016, eq. 16.
    """
    advantages = torch.zeros_like(rewards)
    ahead = torch.zeros_like(rewards[:, 0])  # advantage of the next token of the policy
    next_value = torch.zeros_like(ahead)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = torch.where(mask[:, t], delta + gamma * lam * ahead, ahead)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = ahead
    return advantages, advantages + values
