"""Compare the seconds that cells need to reach a goal, seed by seed.

If cells sample different numbers of tokens, their seconds per iteration are not comparable, but the seconds
to a goal are. A seed reaches the goal where the line between two of its evaluations crosses the goal. For
each seed, the comparison takes the logarithm of the ratio of the two cells' seconds. It then computes
Student's interval for the mean. The result is therefore a ratio of geometric means.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Literal

from rlflow.benchmarks.curves import Cell, Curve, time_to_goal
from rlflow.benchmarks.forecast import announced, observations_left
from rlflow.benchmarks.learning import ALPHA, LEAST_SEEDS
from rlflow.benchmarks.resampling import Interval
from rlflow.benchmarks.student import t_quantile

Outcome = Literal[
    "sooner", "later", "same within the margin", "undecided", "not enough to rank", "not reached by all"
]


@dataclass(frozen=True)
class Sooner:
    """The comparison of a cell with the base by the time to a goal."""

    cell: Cell
    base: Cell
    goal: float
    outcome: Outcome
    seeds: int  # number of pairs of seeds
    ratio: float = math.nan  # seconds of the cell divided by seconds of the base
    interval: Interval | None = None  # interval of the ratio
    margin: float = 0.0  # a ratio from 1 / (1 + margin) to 1 + margin counts as equal
    more: int | None = None  # for an undecided pair, about how many more seeds it needs

    @property
    def text(self) -> str:
        """The result as one sentence."""
        if self.interval is None:
            times = "; ".join(
                f"{each.name}: {time_to_goal(each, self.goal).text}" for each in (self.cell, self.base)
            )
            least = (
                f", {self.seeds} pairs of seeds of at least {LEAST_SEEDS}"
                if self.outcome == "not enough to rank"
                else ""
            )
            return f"{self.outcome}{least}; {times}"
        outcome = self.outcome if self.more is None else f"undecided, {announced(self.more, 'seeds')}"
        medians = [statistics.median(_seconds(each, self.goal).values()) for each in (self.cell, self.base)]
        return (
            f"{outcome}; {self.ratio:.4g} times the seconds, {self.interval.text}, {self.seeds} pairs of "
            f"seeds, margin {100 * self.margin:.4g} %; medians {medians[0]:.4g} s vs {medians[1]:.4g} s"
        )


def compared(cell: Cell, base: Cell, goal: float, *, margin: float, pairs: int = 1) -> Sooner:
    """Compare two cells by the seconds until they reach ``goal``.

    ``margin``: relative difference that counts as equal. ``pairs``: number of cells that are compared with
    the base. They share the error probability equally.
    """
    times = [_seconds(each, goal) for each in (cell, base)]
    both = sorted(set(times[0]) & set(times[1]))
    if len(both) < len(set(cell.seeds) & set(base.seeds)):
        return Sooner(cell, base, goal, "not reached by all", len(both))
    if len(both) < LEAST_SEEDS:
        return Sooner(cell, base, goal, "not enough to rank", len(both))
    logs = [math.log(times[0][seed] / times[1][seed]) for seed in both]
    level, freedom = 1 - ALPHA / pairs, len(both) - 1
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(both))
    half = error * t_quantile((1 + level) / 2, freedom)
    outcome = _outcome(mean - half, mean + half, math.log1p(margin))
    effect = max(math.log1p(margin), abs(mean) - error)
    more = observations_left(len(both), error, effect, level, freedom) if outcome == "undecided" else None
    interval = Interval(math.exp(mean - half), math.exp(mean + half), level, "t" if error else "no spread")
    return Sooner(cell, base, goal, outcome, len(both), math.exp(mean), interval, margin, more)


def _outcome(low: float, high: float, margin: float) -> Outcome:
    """Return the outcome for an interval of the ratio's logarithm."""
    if -margin <= low and high <= margin:
        return "same within the margin"
    return "later" if low > 0 else "sooner" if high < 0 else "undecided"


def _seconds(cell: Cell, goal: float) -> dict[int, float]:
    """Return the seconds after which each seed reached the goal, by seed.

    Seeds that did not reach it are omitted.
    """
    return {curve.seed: seconds for curve in cell.curves if (seconds := crossing(curve, goal)) is not None}


def crossing(curve: Curve, goal: float) -> float | None:
    """Return the seconds at which the linearly interpolated curve first reaches ``goal``; None if it never
    does.

    A curve that starts at or above the goal counts as never reaching it, because there is no time to compare.
    """
    points = curve.ordered
    for before, after in itertools.pairwise(points):
        if before.value < goal <= after.value:
            return before.seconds + (after.seconds - before.seconds) * (goal - before.value) / (
                after.value - before.value
            )
    return None
