"""Which cell learns better, from the last value of each seed.

Means are compared, with Student's t of the differences where both cells have the same seeds, else with
Welch's. Two cells with the same seeds had the same held-out prompts, and drew from the same random numbers:
seeds are then compared in pairs, so that what a seed does to both cells widens no interval. Resampling is no
help with so few seeds: the mean of resampled pairs never leaves the range of the pairs, so five pairs of one
sign, which equal cells have with a chance of 6 %, would leave out 0 at every level.

With several cells beside a base the probability of error is that of all pairs together, by Holm's procedure.
The probability of improvement follows Agarwal et al., "Deep Reinforcement Learning at the Edge of the
Statistical Precipice" (NeurIPS 2021, arXiv
2108.13264); its interval is Newcombe's. What one seed's curve says of itself is in `curves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlflow.benchmarks.curves import Cell
from rlflow.benchmarks.forecast import announced, observations_left
from rlflow.benchmarks.holm import holm
from rlflow.benchmarks.resampling import Floats, Interval
from rlflow.benchmarks.student import NORMAL, t_quantile, t_tail

Outcome = Literal[
    "better", "worse", "equivalent within the margin", "undecided", "not enough to rank", "not comparable"
]
ALPHA = 0.05  # probability of any wrong `better` or `worse` among the cells of a comparison
# with fewer, too little is known of the spread: the error and the power of verdicts are simulated from here
# on
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Estimate:
    """A number and its interval."""

    value: float
    interval: Interval

    @property
    def text(self) -> str:
        """The number, then its interval."""
        return f"{self.value:.4g}, {self.interval.text}"


@dataclass(frozen=True)
class Ranking:
    """One cell beside the base, as the seeds have it."""

    cell: str
    base: str
    outcome: Outcome
    seeds: tuple[int, int]  # how many each has
    difference: Estimate | None  # mean of the cell's final values minus the base's, at the level that decides
    improvement: Estimate | None  # probability that a seed of the cell ends better than one of the base
    equivalence: float  # p of two one-sided tests within the margin; NaN where there is none
    # absolute: differences of final values up to it count as none; 0: nothing counts as equivalent
    margin: float
    paired: bool  # whether both have the same seeds, which are compared in pairs
    # about how many more seeds an undecided pair needs for each cell, at most `FARTHEST`; none where nothing
    # tells
    more: int | None
    reason: str = ""  # why cells are not comparable

    @property
    def text(self) -> str:
        """One sentence."""
        if self.outcome == "not comparable":
            return f"{self.cell} and {self.base} are not comparable: {self.reason}"
        if self.outcome == "not enough to rank" or self.difference is None or self.improvement is None:
            seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds of at least {LEAST_SEEDS}"
            return f"{self.cell} beside {self.base}: not enough to rank, {seeds}"
        outcome = self.outcome if self.more is None else f"undecided, {announced(self.more, 'seeds')}"
        count = (
            f"{self.seeds[0]} pairs of seeds" if self.paired else f"{self.seeds[0]} and {self.seeds[1]} seeds"
        )
        return (
            f"{self.cell} beside {self.base}: {outcome}; means differ by {self.difference.text}; "
            f"probability of improvement {self.improvement.text}; {count}, margin {self.margin:.4g}"
        )


def difference(
    ours: Sequence[float], reference: Sequence[float], *, paired: bool = False, level: float = 0.95
) -> Estimate:
    """Mean of ``ours`` minus that of ``reference``, each of two or more values, with Student's interval of
    the differences where values of one place are a pair, else with Welch's."""
    mean, error, freedom = _means(ours, reference, paired)
    half = error * t_quantile((1 + level) / 2, freedom) if error else 0.0
    return Estimate(mean, Interval(mean - half, mean + half, level, "t" if error else "no spread"))


def surprise(cell: Cell, base: Cell) -> float:
    """Two-sided p of the difference of means, were there none; 1 where the two cannot be ranked."""
    if _unrankable(cell, base):
        return 1.0
    mean, error, freedom = _means(cell.final, base.final, cell.seeds == base.seeds)
    return 2 * t_tail(abs(mean) / error, freedom) if error else float(mean == 0)


def _unrankable(cell: Cell, base: Cell) -> Outcome | None:
    """Why two cells have no verdict; None where they have one."""
    if cell.unusable or base.unusable:
        return "not comparable"
    return "not enough to rank" if min(len(cell.final), len(base.final)) < LEAST_SEEDS else None


def probability_of_improvement(
    ours: Sequence[float], reference: Sequence[float], *, level: float = 0.95
) -> Estimate:
    """P(X > Y) of an observation of ``ours`` and one of ``reference``, ties counted half.

    The interval is method 5 of Newcombe, "Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic", Statistics in Medicine 25, 2006: the probabilities that lie within z of their own
    standard errors. A bootstrap has no width where all of one side are above the other, which happens with
    few seeds.
    """
    first, second = (
        np.asarray(ours, dtype=np.float64)[:, None],
        np.asarray(reference, dtype=np.float64)[None, :],
    )
    value = float(((first > second) + 0.5 * (first == second)).mean())
    z = NORMAL.inv_cdf((1 + level) / 2)
    low, high = (_reach(value, end, z, first.size, second.size) for end in (0.0, 1.0))
    return Estimate(value, Interval(low, high, level, "Newcombe"))


def _reach(value: float, end: float, z: float, first: int, second: int) -> float:
    """The probability farthest from ``value`` towards ``end`` that is within z of its own standard errors of
    it."""
    near, far = value, end
    for _ in range(60):
        middle = (near + far) / 2
        within = abs(middle - value) <= z * math.sqrt(_variance(middle, first, second))
        near, far = (middle, far) if within else (near, middle)
    return far


def _variance(theta: float, first: int, second: int) -> float:
    """Newcombe's variance of the Mann-Whitney probability, both sizes in the mixed terms replaced by their
    mean."""
    mixed = (first + second) / 2 - 1
    return (
        theta
        * (1 - theta)
        * (1 + mixed * ((1 - theta) / (2 - theta) + theta / (1 + theta)))
        / (first * second)
    )


def equivalence(
    ours: Sequence[float], reference: Sequence[float], margin: float, *, paired: bool = False
) -> float:
    """The p of two one-sided tests (TOST) that means differ by less than ``margin`` (Schuirmann, J.
    Pharmacokinetics and Biopharmaceutics 15, 1987), with Welch's t, or with that of the differences where
    values of one place are a pair: below 0.05 they are equivalent. Each side has two or more observations."""
    mean, error, freedom = _means(ours, reference, paired)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return t_tail((margin - abs(mean)) / error, freedom)


def _means(ours: Sequence[float], reference: Sequence[float], paired: bool) -> tuple[float, float, float]:
    """Difference of means, its standard error, and its degrees of freedom."""
    arrays = [np.asarray(values, dtype=np.float64) for values in (ours, reference)]
    if paired:
        differences = arrays[0] - arrays[1]
        return (
            float(differences.mean()),
            float(differences.std(ddof=1)) / math.sqrt(len(differences)),
            len(differences) - 1,
        )
    return _welch(*arrays)


def _welch(ours: Floats, reference: Floats) -> tuple[float, float, float]:
    """Difference of means of two sides that are drawn independently, its standard error, and Welch's degrees
    of freedom."""
    arrays = (ours, reference)
    squares = [float(array.var(ddof=1)) / len(array) for array in arrays]
    top = max(squares)
    # scaled, so that no square overflows or vanishes
    weights = [square / top if top else 0.0 for square in squares]
    below = sum(weight**2 / (len(array) - 1) for weight, array in zip(weights, arrays, strict=True))
    freedom = sum(weights) ** 2 / below if below else math.inf
    return float(ours.mean() - reference.mean()), math.sqrt(sum(squares)), freedom


def ranked_all(
    cells: Sequence[Cell], base: Cell, *, margin: float = 0.0, higher: bool = True
) -> tuple[Ranking, ...]:
    """Compare each cell with ``base``, so that anything is wrongly found better or worse with a probability
    of 5 % in all: each pair has an equal part of it, and one that is found leaves its part to the others
    (Holm). A pair that cannot be ranked keeps its part."""
    levels = holm({cell.name: surprise(cell, base) for cell in cells}, ALPHA)
    return tuple(
        ranked(cell, base, margin=margin, higher=higher, alpha=levels[cell.name][0]) for cell in cells
    )


def ranked(
    cell: Cell, base: Cell, *, margin: float = 0.0, higher: bool = True, alpha: float = ALPHA
) -> Ranking:
    """Compare two cells by their final values. ``higher``: larger values are better; ``alpha``: the
    probability of error.

    Equivalent where both one-sided tests reject at ``alpha``, even where the interval leaves out 0; otherwise
    better or worse where the interval of the difference of means leaves out 0.
    """
    ours, reference = cell.final, base.final
    seeds, paired = (len(ours), len(reference)), cell.seeds == base.seeds
    if outcome := _unrankable(cell, base):
        return Ranking(
            cell.name,
            base.name,
            outcome,
            seeds,
            None,
            None,
            math.nan,
            margin,
            paired,
            None,
            cell.unusable or base.unusable,
        )
    gain = difference(ours, reference, paired=paired, level=1 - alpha)
    p = equivalence(ours, reference, margin, paired=paired) if margin > 0 else math.nan
    outcome = "equivalent within the margin" if p < alpha else _direction(gain, higher)
    more = _more(ours, reference, margin, alpha, paired) if outcome == "undecided" else None
    chance = probability_of_improvement(*((ours, reference) if higher else (reference, ours)))
    return Ranking(cell.name, base.name, outcome, seeds, gain, chance, p, margin, paired, more)


def _direction(gain: Estimate, higher: bool) -> Outcome:
    if gain.interval.low <= 0 <= gain.interval.high:
        return "undecided"
    return "better" if (gain.value > 0) == higher else "worse"


def _more(
    ours: Sequence[float], reference: Sequence[float], margin: float, alpha: float, paired: bool
) -> int | None:
    """About how many more seeds each cell needs: until the margin, or the difference of means less its
    standard error where that is larger, is found with a chance of 0.8. None where neither is above 0."""
    mean, error, freedom = _means(ours, reference, paired)
    effect = max(margin, abs(mean) - error)
    if effect <= 0:
        return None
    seeds = min(len(ours), len(reference))
    return observations_left(seeds, error, effect, 1 - alpha, min(freedom, seeds - 1))


def profile_text(cell: Cell, base: Cell) -> str:
    """A performance profile in words: at the quartiles of all final values, how many seeds of each cell ended
    above them."""
    values = [value for value in (*cell.final, *base.final) if math.isfinite(value)]
    if not values:
        return "no seed has a finite final value"
    marks = sorted({float(mark) for mark in np.quantile(values, [0.25, 0.5, 0.75])})

    def above(each: Cell, mark: float) -> str:
        return f"{sum(value > mark for value in each.final)} of {len(each.final)}"

    return ", ".join(f"{mark:.4g}: {above(cell, mark)} beside {above(base, mark)}" for mark in marks)
