"""Learning curves: the final value, the area under the curve, and the time to a goal, which a seed may never
reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

By = Literal["seconds", "tokens"]


class Point(NamedTuple):
    """One evaluation."""

    iteration: int  # how many had been done
    seconds: float  # wall seconds since the start of training
    tokens: float  # tokens trained until then
    value: float  # of the metric


@dataclass(frozen=True)
class Curve:
    """The evaluations of one seed, in any order; at least one."""

    seed: int
    points: tuple[Point, ...]

    @property
    def ordered(self) -> tuple[Point, ...]:
        """The points by iteration."""
        return tuple(sorted(self.points, key=lambda point: point.iteration))

    @property
    def final(self) -> float:
        """The value after the last iteration."""
        return self.ordered[-1].value


@dataclass(frozen=True)
class Cell:
    """The curves of one cell."""

    name: str
    curves: tuple[Curve, ...]  # one for each seed

    @property
    def final(self) -> tuple[float, ...]:
        """The final value of each seed; of those without a point none."""
        return tuple(curve.final for curve in self.curves if curve.points)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each final value."""
        return tuple(curve.seed for curve in self.curves if curve.points)

    @property
    def unusable(self) -> str:
        """Why the cell cannot be compared; empty where it can."""
        bad = [str(curve.seed) for curve in self.curves if not curve.points or not math.isfinite(curve.final)]
        return f"{self.name} has no finite final value for seed {', '.join(bad)}" if bad else ""


@dataclass(frozen=True)
class TimeToGoal:
    """Seconds or tokens until half of the seeds had reached a goal."""

    goal: float
    median: float | None  # by Kaplan and Meier; none where fewer than half are known to have reached it
    reached: int  # seeds that did
    seeds: int
    longest: float  # until when the seed was watched that was watched longest
    by: By = "seconds"

    @property
    def text(self) -> str:
        """One sentence."""
        of = f"({self.reached} of {self.seeds} seeds reached {self.goal:.4g})"
        if self.median is None:
            return f"not reached by the median seed within {self.longest:.4g} {self.by} {of}"
        return f"the median seed took {self.median:.4g} {self.by} {of}"


def horizon(cells: Sequence[Cell], by: By = "seconds") -> float:
    """Where the shortest of all curves ends: the common horizon for areas. 0 where there is no curve."""
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
    """Mean of the curve from 0 to ``end`` by the trapezoid rule, as part of the range from ``low`` to
    ``high`` of the metric.

    Before its first point and after its last a curve is flat. With no length (``end`` of 0) it is the first
    value; a range of no width counts as 1.
    """
    ordered = curve.ordered
    x = np.maximum.accumulate(np.array([getattr(point, by) for point in ordered], dtype=np.float64))
    values = (np.array([point.value for point in ordered], dtype=np.float64) - low) / ((high - low) or 1.0)
    if end <= 0:
        return float(values[0])
    inside = x < end
    corners = np.concatenate([[0.0], x[inside], [end]])
    heights = np.concatenate([values[:1], values[inside], [np.interp(end, x, values)]])
    # numpy 1 and 2 name the rule differently
    return float(np.diff(corners) @ (heights[1:] + heights[:-1]) / 2 / end)


def time_to_goal(cell: Cell, goal: float, *, by: By = "seconds", higher: bool = True) -> TimeToGoal:
    """When the median seed first reached ``goal``. A seed that did not is known to take longer than it was
    watched (it is censored)."""
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
    """The first time by which half are estimated to have had their event (Kaplan and Meier, JASA 53, 1958);
    None where that is never known. Who is censored at the time of an event was still watched then."""
    surviving = 1.0
    for time in sorted({time for time, event in zip(times, events, strict=True) if event}):
        watched = sum(other >= time for other in times)
        ended = sum(event and other == time for other, event in zip(times, events, strict=True))
        surviving *= 1 - ended / watched
        if surviving <= 0.5 + 1e-12:
            return time
    return None
