"""What a policy update raises."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_gain(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A), all [rows, T] (Schulman et al. 2017, eq. 7).

    With ``dual`` the gain of a negative advantage is at least dual A, however large the ratio (Ye et al. 2020, eq. 5).
    """
    gain = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return gain if dual is None else torch.where(advantages < 0, torch.max(gain, dual * advantages), gain)
