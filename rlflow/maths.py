"""The arithmetic that algorithms share, written as in the papers.

Masks are bool [rows, T]. Masked entries are taken out with ``where``, never by multiplying, so NaN in padding cannot leak.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.author.stage import stage


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [rows, T] under mask, 0-d. Rows that are not finite under the mask are left out; nothing left gives 0."""
    x, mask = _finite(x, mask)
    return (x.sum() / mask.sum().clamp(min=1)).to(x.dtype)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) under mask [rows, T], statistics over the whole tensor, unbiased, in float64.

    Rows that are not finite under the mask stay out of the statistics and stay non-finite. A single entry gives 0.
    """
    finite, inside = _finite(x.double(), mask)
    count = inside.sum()
    mean = finite.sum() / count.clamp(min=1)
    variance = torch.where(inside, (finite - mean).square(), 0.0).sum() / (count - 1).clamp(min=1)
    white = (torch.where(mask, x.double(), mean) - mean) * torch.rsqrt(variance + 1e-8)
    return white.to(x.dtype)


def place_last(scores: Tensor, mask: Tensor) -> Tensor:
    """scores [rows] at the last True of mask [rows, T], 0 elsewhere. A row without a True gets none."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1, keepdim=True) if mask.shape[1] else places[None]
    return torch.where((places == last) & mask, scores[:, None], torch.zeros((), dtype=scores.dtype))


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
    """Mean over each group, one value per row [rows]. NaN is missing and left out; a group of only NaN gives NaN."""
    total, count, slots = _totals(x.double(), group)
    return (total / count)[slots].to(x.dtype)


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """Deviation (n - 1) of each group, one value per row. Singletons and groups of equal values give exactly 0."""
    total, count, slots = _totals(x.double(), group)
    mean = (total / count)[slots]
    squares, _, _ = _totals((x.double() - mean).square(), group)
    low, high = _per_group(x.double(), slots, len(count), "amin"), _per_group(x.double(), slots, len(count), "amax")
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return torch.where(low == high, 0.0, deviation).nan_to_num(0.0)[slots].to(x.dtype)


def leave_one_out(x: Tensor, group: Tensor) -> Tensor:
    """Mean of the other rows of the group, one value per row (Kool et al. 2019; RLOO). NaN where there is no other row."""
    total, count, slots = _totals(x.double(), group)
    present = ~x.isnan()
    others = count[slots] - present.double()
    return ((total[slots] - x.double().nan_to_num(0.0)) / torch.where(others > 0, others, torch.nan)).to(x.dtype)


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


def _totals(x: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, slots = torch.unique(group, return_inverse=True)
    groups = int(slots.max()) + 1 if len(slots) else 0
    total = torch.zeros(groups, dtype=torch.float64).index_add_(0, slots, x.nan_to_num(0.0))
    count = torch.zeros(groups, dtype=torch.float64).index_add_(0, slots, (~x.isnan()).double())
    return total, count, slots


def _per_group(x: Tensor, slots: Tensor, groups: int, reduce: str) -> Tensor:
    edge = torch.inf if reduce == "amin" else -torch.inf
    present = torch.where(x.isnan(), edge, x)
    return torch.full((groups,), edge, dtype=torch.float64).scatter_reduce_(0, slots, present, reduce)
