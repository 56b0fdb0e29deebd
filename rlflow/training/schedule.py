"""The learning rate of each optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlflow.errors import PlanError

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: a linear warmup followed by a constant, linear or cosine rate. Raises
    PlanError if the rate is meant to fall but ``total`` leaves no steps after the warmup."""

    peak: float  # highest rate
    shape: Shape = "constant"  # shape of the curve after the warmup
    warmup: int = 0  # steps over which the rate rises from 0
    total: int = 0  # step at which a falling rate reaches 0

    def __post_init__(self) -> None:
        if self.shape != "constant" and self.total <= self.warmup:
            raise PlanError.of(
                "schedule",
                f"the schedule '{self.shape}' needs an end",
                found=f"warmup={self.warmup} and {self.total} updates in all",
                expected="more updates than warmup",
                remedy="use more updates, or the schedule 'constant', which needs no number of updates",
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        return self.peak * (1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2)
