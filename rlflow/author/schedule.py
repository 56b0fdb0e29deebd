"""Schedules: the iterations in which a call of a flow is due."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallSchedule:
    """The iterations in which a call is due: ``after``, ``after + every``, ``after + 2 * every`` and so on.

    Iterations are counted from 0, so by default a call is due in all of them.
    """

    every: int = 1  # at least 1
    after: int = 0  # at least 0: the first iteration in which the call is due

    def due(self, iteration: int) -> bool:
        """Return True if the call is due in this iteration."""
        return iteration >= self.after and (iteration - self.after) % self.every == 0

    def count(self, iterations: int) -> int:
        """Return in how many of the first ``iterations`` iterations the call is due."""
        return len(range(self.after, iterations, self.every))

    def __str__(self) -> str:
        parts = [f"every={self.every}"] * (self.every != 1) + [f"after={self.after}"] * (self.after != 0)
        return ", ".join(parts) or "every iteration"


ALWAYS = CallSchedule()
