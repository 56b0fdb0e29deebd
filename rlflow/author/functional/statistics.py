"""Statistics of token columns under a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x under the mask, 0-d, computed in float64. x and mask are [rows, T].

    Rows with a non-finite value under the mask are skipped. If no rows are left, the mean is 0.
    """
    finite, inside = _finite(x.double(), mask)
    return like(x, finite.sum() / inside.sum().clamp(min=1))


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), [rows, T], using statistics of all tokens under the mask.

    The variance is unbiased, and both statistics are computed in float64. Rows with a non-finite value under
    the mask are left out of the statistics and get non-finite results. If there is only one token under the
    mask, it gets 0.
    """
    finite, inside = _finite(x.double(), mask)
    count = inside.sum()
    mean = finite.sum() / count.clamp(min=1)
    variance = torch.where(inside, (finite - mean).square(), 0.0).sum() / (count - 1).clamp(min=1)
    white = (torch.where(mask, x.double(), mean) - mean) * torch.rsqrt(variance + 1e-8)
    return like(x, white)


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of x over each row's tokens under the mask, [rows]. x and mask are [rows, T]."""
    return torch.where(mask, x, 0.0).sum(1)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x over each row's tokens under the mask, [rows], or 0 if a row has none."""
    return row_sum(x, mask) / mask.sum(1).clamp(min=1)


def _finite(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Zero x outside the mask and in rows with non-finite values. Also return the mask without those rows."""
    bad = (mask & ~x.isfinite()).any(-1, keepdim=True)
    inside = mask & ~bad
    return torch.where(inside, x, 0.0), inside


def like(x: Tensor, result: Tensor) -> Tensor:
    """Convert ``result`` to the dtype of x, or to float32 if x doesn't hold floats."""
    return result.to(x.dtype if x.is_floating_point() else torch.float32)
