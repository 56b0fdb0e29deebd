"""Statistics of learning curves: final value, area under the curve, and time to a goal.

Some seeds may never reach the goal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

By = Literal["seconds", "tokens"]


class Point(NamedTuple):
    """One evaluation, a point of a learning curve."""

    iteration: int  # number of iterations done before the evaluation
    seconds: float  # wall seconds of these iterations together
    tokens: float  # number of tokens sampled in these iterations
    value: float  # value of the metric in the evaluation


@dataclass(frozen=True)
class Curve:
    """The learning curve of one seed: one or more evaluations, in any order."""

    seed: int
    points: tuple[Point, ...]

    @property
    def ordered(self) -> tuple[Point, ...]:
        """The points in the order of iterations."""
        return tuple(sorted(self.points, key=lambda point: point.iteration))

    @property
    def final(self) -> float:
        """The value of the last evaluation, which is the one after the most iterations."""
        return self.ordered[-1].value


@dataclass(frozen=True)
class Cell:
    """The learning curves of one cell."""

    name: str
    curves: tuple[Curve, ...]  # one curve for each seed

    @property
    def final(self) -> tuple[float, ...]:
        """The final value of each seed that has a point."""
        return tuple(curve.final for curve in self.curves if curve.points)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have a final value, in the same order."""
        return tuple(curve.seed for curve in self.curves if curve.points)

    @property
    def unusable(self) -> str:
        """Why the cell cannot be compared; empty if it can be."""
        bad = [str(curve.seed) for curve in self.curves if not curve.points or not math.isfinite(curve.final)]
        return f"{self.name} has no finite final value for seed {', '.join(bad)}" if bad else ""


@dataclass(frozen=True)
class TimeToGoal:
    """The seconds or tokens after which half of the seeds had reached a goal."""

    goal: float
    median: float | None  # Kaplan-Meier median; None if fewer than half of the seeds reached the goal
    reached: int  # number of seeds that reached the goal
    seeds: int
    longest: float  # where the longest curve ends, in seconds or tokens
    by: By = "seconds"

    @property
    def text(self) -> str:
        """The result as one sentence."""
        of = f"({self.reached} of {self.seeds} seeds reached {self.goal:.4g})"
        if self.median is None:
            return f"not reached by the median seed within {self.longest:.4g} {self.by} {of}"
        return f"the median seed took {self.median:.4g} {self.by} {of}"


def horizon(cells: Sequence[Cell], by: By = "seconds") -> float:
    """Return the end of the shortest curve, in seconds or tokens; 0 without curves.

    Areas under all curves are computed up to this point.
    """
    return min(
        (
            max(getattr(point, by) for point in curve.points)
            for cell in cells
            for curve in cell.curves
            if curve.points
        ),
        default=0.0,
    )


def area(curve: Curve, end: float, *, by: By = "seconds", low: float = 0.0, high: float = 1.0) -> float:
    """Return the mean height of a curve from 0 to ``end``, by the trapezoid rule.

    Heights are scaled so that the range from ``low`` to ``high`` becomes 0 to 1. If both are equal, heights
    are not scaled. The curve is flat before its first point and after its last point. If ``end`` is 0,
    returns the first value.
    """
    ordered = curve.ordered
    x = np.maximum.accumulate(np.array([getattr(point, by) for point in ordered], dtype=np.float64))
    values = (np.array([point.value for point in ordered], dtype=np.float64) - low) / ((high - low) or 1.0)
    if end <= 0:
        return float(values[0])
    inside = x < end
    corners = np.concatenate([[0.0], x[inside], [end]])
    heights = np.concatenate([values[:1], values[inside], [np.interp(end, x, values)]])
    # numpy 1 and numpy 2 have different names for the rule
    return float(np.diff(corners) @ (heights[1:] + heights[:-1]) / 2 / end)


def time_to_goal(cell: Cell, goal: float, *, by: By = "seconds", higher: bool = True) -> TimeToGoal:
    """Return when the median seed first reached ``goal``, in seconds or tokens (``by``).

    A seed that never reached the goal is censored at the end of its curve. ``higher``: whether larger values
    are better.
    """
    times, events = [], []
    for curve in cell.curves:
        reached = [
            getattr(point, by)
            for point in curve.ordered
            if (point.value >= goal if higher else point.value <= goal)
        ]
        times.append(
            min(reached) if reached else max((getattr(point, by) for point in curve.points), default=0.0)
        )
        events.append(bool(reached))
    return TimeToGoal(
        goal, kaplan_meier_median(times, events), sum(events), len(times), max(times, default=0.0), by
    )


def kaplan_meier_median(times: Sequence[float], events: Sequence[bool]) -> float | None:
    """Return the first time at which the estimated survival is at most one half; None if there is none.

    Kaplan and Meier, JASA 53, 1958. ``events``: for each seed, whether its time is an event; otherwise the
    seed is censored then. A seed that is censored at the time of an event still counts as at risk.
    """
    surviving = 1.0
    for time in sorted({time for time, event in zip(times, events, strict=True) if event}):
        watched = sum(other >= time for other in times)
        ended = sum(event and other == time for other, event in zip(times, events, strict=True))
        surviving *= 1 - ended / watched
        if surviving <= 0.5 + 1e-12:
            return time
    return None
