"""Credit assignment: which token gets which reward or advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.stage import stage


def place_last(scores: Tensor, mask: Tensor) -> Tensor:
    """Place each row's score on the last token under the mask, and 0 on all other tokens: [rows, T].

    scores: [rows]. mask: bool [rows, T]. Rows with an empty mask get only zeros.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1, keepdim=True) if mask.shape[1] else places[None]
    return torch.where(
        (places == last) & mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device)
    )


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Sum each token's own and later rewards, discounted by ``gamma``: [rows, T], 0 outside the mask.

    rewards and mask are [rows, T]. Masked-out tokens aren't steps, so they add no discount.
    """
    returns, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, t], rewards[:, t] + gamma * ahead, ahead)
        returns[:, t] = torch.where(mask[:, t], ahead, 0.0)
    return returns


@stage(gives=("advantages", "returns"))
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of generalised advantage estimation, both [rows, T].

    rewards, values and mask are [rows, T]. The returns are advantages + values. Masked-out tokens, such as a
    tool's output, aren't steps: advantages and values carry across them without a discount.

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
