"""The arithmetic that algorithms share, written as in the papers.

Masks are bool [rows, T]. Masked entries are taken out with ``where``, never by multiplying, so NaN in padding cannot leak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.author.stage import stage


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [rows, T] under mask, 0-d, in float64. Rows that are not finite under the mask are left out; nothing left gives 0."""
    finite, inside = _finite(x.double(), mask)
    return _as(x, finite.sum() / inside.sum().clamp(min=1))


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) under mask [rows, T], statistics over the whole tensor, unbiased, in float64.

    Rows that are not finite under the mask stay out of the statistics and stay non-finite. A single entry gives 0.
    """
    finite, inside = _finite(x.double(), mask)
    count = inside.sum()
    mean = finite.sum() / count.clamp(min=1)
    variance = torch.where(inside, (finite - mean).square(), 0.0).sum() / (count - 1).clamp(min=1)
    white = (torch.where(mask, x.double(), mean) - mean) * torch.rsqrt(variance + 1e-8)
    return _as(x, white)


def place_last(scores: Tensor, mask: Tensor) -> Tensor:
    """scores [rows] at the last True of mask [rows, T], 0 elsewhere. A row without a True gets none."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1, keepdim=True) if mask.shape[1] else places[None]
    return torch.where((places == last) & mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy, reference) in nats, from tokens of the policy (Schulman, "Approximating KL divergence").

    With r = ref / policy: k1 = -log r; k2 = (log r)² / 2; k3 = r - 1 - log r. Charge k1 in the reward. As a loss k1 has no
    gradient in expectation, k2 has the right one on-policy, and k3 descends the forward KL.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    raise ValueError(f"kl: found estimator {estimator!r}, expected 'k1', 'k2' or 'k3'")


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    """Mean over each group, one value per row [rows]. NaN is missing and left out; a group of only NaN gives NaN.

    A group of equal values has exactly that mean.
    """
    return _as(x, _means(_totals(x.double(), group)))


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """Deviation (n - 1) of each group, one value per row. Singletons and groups of equal values give exactly 0."""
    totals = _totals(x.double(), group)
    squares = _totals((x.double() - _means(totals)).square(), group).total
    deviation = (squares / (totals.count - 1).clamp(min=1)).sqrt()
    return _as(x, torch.where(totals.low == totals.high, 0.0, deviation)[totals.slots])


def leave_one_out(x: Tensor, group: Tensor) -> Tensor:
    """Mean of the other rows of the group, one value per row (Kool et al. 2019; RLOO). NaN where there is no other row."""
    totals = _totals(x.double(), group)
    present = ~x.isnan()
    others = totals.count[totals.slots] - present.double()
    mean = (totals.total[totals.slots] - torch.where(present, x.double(), 0.0)) / torch.where(others > 0, others, torch.nan)
    return _as(x, _between(mean, totals))


def length_weighted_mean(x: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """sum(lengths x) / sum(lengths) over each group, one value per row (Hao et al. 2025; OPO). NaN in x is missing and left out."""
    there = torch.where(x.isnan(), 0, lengths).double()
    total, weight = _totals(torch.where(x.isnan(), 0.0, x.double()) * there, group), _totals(there, group)
    return _as(x, _between((total.total / weight.total)[total.slots], _totals(x.double(), group)))


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """sum over u >= t of gamma^(u - t) rewards[u], counted in tokens of the mask [rows, T]; 0 outside. Holes are carried over."""
    returns, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, t], rewards[:, t] + gamma * ahead, ahead)
        returns[:, t] = torch.where(mask[:, t], ahead, 0.0)
    return returns


def clipped_gain(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7)."""
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x [rows, T] over each row's tokens [rows]."""
    return torch.where(mask, x, 0.0).sum(1)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [rows, T] over each row's tokens [rows]; 0 for a row without any."""
    return row_sum(x, mask) / mask.sum(1).clamp(min=1)


@stage(gives="weights")
def truncated_weights(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(exp(logprobs - sampled_logprobs), cap) per token, 1 outside the mask (truncated importance sampling, Yao et al. 2025)."""
    log_ratio = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    return log_ratio.exp().clamp(max=cap)


def _finite(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x with 0 outside the mask and in rows that are not finite under it, and the mask without those rows."""
    bad = (mask & ~x.isfinite()).any(-1, keepdim=True)
    inside = mask & ~bad
    return torch.where(inside, x, 0.0), inside


@dataclass(frozen=True)
class _Totals:
    """Of the values that are there: sum, number, lowest and highest of each group, float64 [groups]; and each row's group."""

    total: Tensor
    count: Tensor
    low: Tensor
    high: Tensor
    slots: Tensor


def _totals(x: Tensor, group: Tensor) -> _Totals:
    _, slots = torch.unique(group, return_inverse=True)
    groups = int(slots.max()) + 1 if len(slots) else 0
    missing = x.isnan()

    def over(start: float, reduce: str, values: Tensor) -> Tensor:
        return torch.full((groups,), start, dtype=torch.float64, device=x.device).scatter_reduce(0, slots, values, reduce)

    low, high = over(torch.inf, "amin", x.masked_fill(missing, torch.inf)), over(-torch.inf, "amax", x.masked_fill(missing, -torch.inf))
    return _Totals(over(0, "sum", x.masked_fill(missing, 0.0)), over(0, "sum", (~missing).double()), low, high, slots)


def _means(totals: _Totals) -> Tensor:
    """The mean of each row's group."""
    return _between((totals.total / totals.count)[totals.slots], totals)


def _between(mean: Tensor, totals: _Totals) -> Tensor:
    """Rounding must not take a mean out of the range of its group: equal values have that very mean. NaN stays."""
    low, high = totals.low[totals.slots], totals.high[totals.slots]
    return torch.where(mean.isnan(), mean, mean.clamp(low, high))


def _as(x: Tensor, result: Tensor) -> Tensor:
    """In the dtype of x; of numbers that are no floats in float32."""
    return result.to(x.dtype if x.is_floating_point() else torch.float32)
