"""Test which cell learns better, by the final value of each seed.

The test compares means. It is a paired t-test if both cells have the same seeds, otherwise Welch's t-test.
Cells with the same seeds have the same held-out prompts and random numbers. Pairing them removes the effect
of the seed from the interval. Resampling does not work with so few seeds, because the mean of resampled pairs
never leaves the range of the pairs. For example, if there are five pairs and all differences have the same
sign, their resampled interval excludes 0 at every level. Yet equal cells give such differences with a
probability of 6 %.

If several cells are compared with a base, Holm's procedure bounds the error probability of all pairs
together. The probability of improvement follows Agarwal et al., "Deep Reinforcement Learning at the Edge of
the Statistical Precipice" (NeurIPS 2021, arXiv 2108.13264); its interval is Newcombe's. `curves.py` has the
statistics of a single curve.
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
ALPHA = 0.05  # probability that any verdict `better` or `worse` in a comparison is wrong
# with fewer seeds, too little is known about the spread; error and power of the verdicts were simulated for 5
# seeds and more
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval."""

    value: float
    interval: Interval

    @property
    def text(self) -> str:
        """The number and its interval as text."""
        return f"{self.value:.4g}, {self.interval.text}"


@dataclass(frozen=True)
class Ranking:
    """The comparison of a cell with the base by the final values of the seeds."""

    cell: str
    base: str
    outcome: Outcome
    seeds: tuple[int, int]  # number of seeds of the cell and of the base
    # mean final value of the cell minus that of the base, with an interval at the deciding level
    difference: Estimate | None
    # probability that a seed of the cell ends with a better value than a seed of the base
    improvement: Estimate | None
    # p-value of two one-sided tests that the difference is within the margin; NaN without a margin
    equivalence: float
    # absolute difference of final values that counts as equal; 0: nothing counts as equivalent
    margin: float
    paired: bool  # whether both cells have the same seeds, which are compared in pairs
    # for an undecided pair, an estimate of how many more seeds each cell needs, at most `FARTHEST`; None: no
    # estimate
    more: int | None
    reason: str = ""  # why the cells are not comparable

    @property
    def text(self) -> str:
        """The result as one sentence."""
        if self.outcome == "not comparable":
            return f"{self.cell} and {self.base} are not comparable: {self.reason}"
        if self.outcome == "not enough to rank" or self.difference is None or self.improvement is None:
            seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds of at least {LEAST_SEEDS}"
            return f"{self.cell} vs {self.base}: not enough to rank, {seeds}"
        outcome = self.outcome if self.more is None else f"undecided, {announced(self.more, 'seeds')}"
        count = (
            f"{self.seeds[0]} pairs of seeds" if self.paired else f"{self.seeds[0]} and {self.seeds[1]} seeds"
        )
        return (
            f"{self.cell} vs {self.base}: {outcome}; means differ by {self.difference.text}; "
            f"probability of improvement {self.improvement.text}; {count}, margin {self.margin:.4g}"
        )


def difference(
    ours: Sequence[float], reference: Sequence[float], *, paired: bool = False, level: float = 0.95
) -> Estimate:
    """Return the mean of ``ours`` minus the mean of ``reference``, with a t interval.

    Both have at least two values. If ``paired``, values with the same index are a pair, and the interval is
    Student's for the differences of the pairs. Otherwise the interval is Welch's.
    """
    mean, error, freedom = _means(ours, reference, paired)
    half = error * t_quantile((1 + level) / 2, freedom) if error else 0.0
    return Estimate(mean, Interval(mean - half, mean + half, level, "t" if error else "no spread"))


def surprise(cell: Cell, base: Cell) -> float:
    """Return the two-sided p-value for the difference of means; 1 if the cells cannot be ranked."""
    if _unrankable(cell, base):
        return 1.0
    mean, error, freedom = _means(cell.final, base.final, cell.seeds == base.seeds)
    return 2 * t_tail(abs(mean) / error, freedom) if error else float(mean == 0)


def _unrankable(cell: Cell, base: Cell) -> Outcome | None:
    """Return the outcome for two cells that cannot be ranked; None if they can be."""
    if cell.unusable or base.unusable:
        return "not comparable"
    return "not enough to rank" if min(len(cell.final), len(base.final)) < LEAST_SEEDS else None


def probability_of_improvement(
    ours: Sequence[float], reference: Sequence[float], *, level: float = 0.95
) -> Estimate:
    """Return P(X > Y) for X drawn from ``ours`` and Y drawn from ``reference``. A tie counts as half.

    The interval is method 5 of Newcombe, "Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic", Statistics in Medicine 25, 2006. It contains all probabilities whose distance
    from the estimate is at most z of their own standard errors. A bootstrap interval is not used: if all
    values of one side are above those of the other, which happens with few seeds, it would have no width.
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
    """Return the end of Newcombe's interval in the direction of ``end``.

    This is the farthest probability whose distance from ``value`` is at most z of its own standard errors.
    ``first`` and ``second``: the sample sizes.
    """
    near, far = value, end
    for _ in range(60):
        middle = (near + far) / 2
        within = abs(middle - value) <= z * math.sqrt(_variance(middle, first, second))
        near, far = (middle, far) if within else (near, middle)
    return far


def _variance(theta: float, first: int, second: int) -> float:
    """Return Newcombe's variance of the Mann-Whitney probability ``theta``.

    ``first`` and ``second``: the sample sizes. In the mixed terms, their mean replaces both.
    """
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
    """Return the p-value of two one-sided tests (TOST) that the means differ by less than ``margin``.

    Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987. Uses Welch's t or, if ``paired``, Student's
    t for the differences. Each side has at least two observations.
    """
    mean, error, freedom = _means(ours, reference, paired)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return t_tail((margin - abs(mean)) / error, freedom)


def _means(ours: Sequence[float], reference: Sequence[float], paired: bool) -> tuple[float, float, float]:
    """Return (difference of means, its standard error, degrees of freedom)."""
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
    """Return (difference of means, its standard error, Welch's degrees of freedom) for two independent
    samples.
    """
    arrays = (ours, reference)
    squares = [float(array.var(ddof=1)) / len(array) for array in arrays]
    top = max(squares)
    # values are scaled, so that their squares neither overflow nor underflow
    weights = [square / top if top else 0.0 for square in squares]
    below = sum(weight**2 / (len(array) - 1) for weight, array in zip(weights, arrays, strict=True))
    freedom = sum(weights) ** 2 / below if below else math.inf
    return float(ours.mean() - reference.mean()), math.sqrt(sum(squares)), freedom


def ranked_all(
    cells: Sequence[Cell], base: Cell, *, margin: float = 0.0, higher: bool = True
) -> tuple[Ranking, ...]:
    """Compare each cell with ``base``.

    With a probability of at least 95 %, no verdict `better` or `worse` is wrong. By Holm's procedure, each
    pair gets an equal part of the error probability. A pair that is found different passes its part on to the
    others. A pair that cannot be ranked keeps its part. ``margin`` and ``higher``: as in `ranked`.
    """
    levels = holm({cell.name: surprise(cell, base) for cell in cells}, ALPHA)
    return tuple(
        ranked(cell, base, margin=margin, higher=higher, alpha=levels[cell.name][0]) for cell in cells
    )


def ranked(
    cell: Cell, base: Cell, *, margin: float = 0.0, higher: bool = True, alpha: float = ALPHA
) -> Ranking:
    """Compare a cell with the base by their final values.

    ``margin``: absolute difference that counts as equal. ``higher``: whether larger values are better.
    ``alpha``: error probability. The cells are equivalent if both one-sided tests reject at ``alpha``, even
    if the interval of the difference excludes 0. Otherwise, the cell is better or worse if the interval
    excludes 0.
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
    probability = probability_of_improvement(*((ours, reference) if higher else (reference, ours)))
    return Ranking(cell.name, base.name, outcome, seeds, gain, probability, p, margin, paired, more)


def _direction(gain: Estimate, higher: bool) -> Outcome:
    if gain.interval.low <= 0 <= gain.interval.high:
        return "undecided"
    return "better" if (gain.value > 0) == higher else "worse"


def _more(
    ours: Sequence[float], reference: Sequence[float], margin: float, alpha: float, paired: bool
) -> int | None:
    """Return an estimate of how many more seeds each cell needs to find the effect with a probability of 0.8.

    The effect is the larger of the margin and the difference of means minus its standard error. None if
    neither is above 0.
    """
    mean, error, freedom = _means(ours, reference, paired)
    effect = max(margin, abs(mean) - error)
    if effect <= 0:
        return None
    seeds = min(len(ours), len(reference))
    return observations_left(seeds, error, effect, 1 - alpha, min(freedom, seeds - 1))


def profile_text(cell: Cell, base: Cell) -> str:
    """Return a performance profile as text: how many seeds of each cell end above each quartile.

    The quartiles are computed from the final values of both cells together.
    """
    values = [value for value in (*cell.final, *base.final) if math.isfinite(value)]
    if not values:
        return "no seed has a finite final value"
    marks = sorted({float(mark) for mark in np.quantile(values, [0.25, 0.5, 0.75])})

    def above(each: Cell, mark: float) -> str:
        return f"{sum(value > mark for value in each.final)} of {len(each.final)}"

    return ", ".join(f"{mark:.4g}: {above(cell, mark)} vs {above(base, mark)}" for mark in marks)
