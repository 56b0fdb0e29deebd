"""Gains: what a policy update maximises per token or response. Also selects tokens for an update."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.functional.statistics import masked_mean, row_mean


def clipped_gain(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return PPO's clipped gain min(ratio A, clip(ratio, 1 - low, 1 + high) A), [rows, T].

    ratio and advantages (A) are [rows, T]. With ``dual``, the gain of a token with a negative advantage never
    falls below dual A, however large its ratio (Ye et al. 2020, eq. 5).

    Source: Schulman et al. 2017, eq. 7.
    """
    gain = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return gain if dual is None else torch.where(advantages < 0, torch.max(gain, dual * advantages), gain)


def geometric_gain(log_ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return GMPO's gain [rows]: the geometric mean of a response's ratios times its mean advantage.

    log_ratio, advantages and mask are [rows, T]. Each log-ratio is clipped to at most high if the token's
    advantage is positive, and to at least -low if it is negative (Zhao et al. 2025, eq. 4).
    """
    inside = torch.where(mask, log_ratio, 0.0)
    sign = torch.where(mask, advantages, 0.0).sign()
    clipped = sign * torch.min(sign * inside, sign * inside.clamp(-low, high))
    return row_mean(clipped, mask).exp() * row_mean(advantages, mask)


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's (log-prob - mean log-prob) × (advantage - mean advantage), [rows, T].

    This tells how much an update on the token lowers the entropy (Cui et al. 2025, "The Entropy Mechanism",
    eq. 8). logprobs, advantages and mask are [rows, T], the means are over all rows, and the result is 0
    outside the mask. Rows with a non-finite value are left out of the means and get non-finite results.
    """
    deviations = [torch.where(mask, x - masked_mean(x, mask), 0.0) for x in (logprobs, advantages)]
    return deviations[0] * deviations[1]


def largest_tokens(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Mark the ``count`` largest finite values of x under the mask. Returns bool [rows, T].

    If there are fewer, all of them are marked. Among equal values, earlier ones come first.
    """
    places = (mask & x.isfinite()).flatten().nonzero()[:, 0]
    order = x.flatten()[places].argsort(descending=True, stable=True)[:count]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[places[order]] = True
    return chosen.reshape(mask.shape)


def drawn_tokens(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Mark ``count`` tokens under the mask, drawn at random without replacement. Returns bool [rows, T].

    If there are fewer, all of them are marked.
    """
    chance = torch.zeros(mask.shape, dtype=torch.float64)
    # draws nothing for padding, so padding does not change the tokens drawn
    chance[mask] = torch.rand(int(mask.sum()), dtype=torch.float64, generator=generator)
    return largest_tokens(chance, mask, count)
