"""The quantities that a policy update maximises, and the selection of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.functional.statistics import masked_mean, row_mean


def clipped_gain(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return min(ratio A, clip(ratio, 1 - low, 1 + high) A), all [rows, T] (Schulman et al. 2017, eq. 7).

    With ``dual``, the gain of a negative advantage is at least dual A, however large the ratio is (Ye et al.
    2020, eq. 5).
    """
    gain = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return gain if dual is None else torch.where(advantages < 0, torch.max(gain, dual * advantages), gain)


def geometric_gain(log_ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return the geometric mean of a response's ratios times its mean advantage [rows] (GMPO).

    log_ratio, advantages and mask are [rows, T]. Each log-ratio is clipped to at most high if its advantage
    is positive, and to at least -low if it is negative (Zhao et al. 2025, eq. 4).
    """
    inside = torch.where(mask, log_ratio, 0.0)
    sign = torch.where(mask, advantages, 0.0).sign()
    clipped = sign * torch.min(sign * inside, sign * inside.clamp(-low, high))
    return row_mean(clipped, mask).exp() * row_mean(advantages, mask)


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (log-prob - mean)(advantage - mean) of each token, 0 outside the mask, all [rows, T].

    Means are over the full batch. The covariance shows how much a token lowers the entropy (Cui et al. 2025,
    "The Entropy Mechanism", eq. 8). Rows with a non-finite value are excluded from the means and stay
    non-finite.
    """
    deviations = [torch.where(mask, x - masked_mean(x, mask), 0.0) for x in (logprobs, advantages)]
    return deviations[0] * deviations[1]


def largest_tokens(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return bool [rows, T]: True at the ``count`` largest finite values of x under the mask.

    If there are fewer than ``count`` such values, all are chosen. Among equal values, earlier ones are chosen
    first.
    """
    places = (mask & x.isfinite()).flatten().nonzero()[:, 0]
    order = x.flatten()[places].argsort(descending=True, stable=True)[:count]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[places[order]] = True
    return chosen.reshape(mask.shape)


def drawn_tokens(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return bool [rows, T]: True at ``count`` tokens of the mask, drawn without replacement.

    If the mask has fewer than ``count`` tokens, all are chosen.
    """
    chance = torch.zeros(mask.shape, dtype=torch.float64)
    # draws nothing for padding, so padding does not change the tokens drawn
    chance[mask] = torch.rand(int(mask.sum()), dtype=torch.float64, generator=generator)
    return largest_tokens(chance, mask, count)
