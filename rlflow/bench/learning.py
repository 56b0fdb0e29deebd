"""Which cell learns better, from a curve of each seed.

Interquartile mean, probability of improvement and stratified resampling follow Agarwal et al., "Deep Reinforcement Learning at the Edge of
the Statistical Precipice" (NeurIPS 2021, arXiv 2108.13264). Percentile intervals cover too little with the few seeds that there are, so
the interval of interquartile means is the expanded percentile one, and that of the probability of improvement is Newcombe's.
What one seed's curve says of itself is in `curves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlflow.bench.curves import Cell
from rlflow.bench.resampling import Floats, Interval, draws, expanded_percentile
from rlflow.bench.student import NORMAL, t_quantile, t_tail

Outcome = Literal["better", "worse", "equivalent within the margin", "undecided", "not enough to rank", "not comparable"]
RESAMPLES = 2000
LEAST_SEEDS = 5  # with fewer, no interval of what is shown here covers as it says


@dataclass(frozen=True)
class Estimate:
    """A number and its interval."""

    value: float
    interval: Interval | None  # none with one observation

    @property
    def text(self) -> str:
        """The number, then its interval."""
        return f"{self.value:.4g}" + (f", {self.interval.text}" if self.interval else "")


@dataclass(frozen=True)
class Ranking:
    """One cell beside the base, as the seeds have it."""

    cell: str
    base: str
    outcome: Outcome
    seeds: tuple[int, int]  # how many each has
    difference: Estimate | None  # interquartile mean of the final values of the cell minus that of the base; none where not comparable
    improvement: Estimate | None  # probability that a seed of the cell ends better than one of the base
    equivalence: float  # p of two one-sided tests within the margin; NaN where there is none
    margin: float  # absolute: differences of final values up to it count as none; 0: nothing counts as equivalent
    more: int | None  # about how many more seeds an undecided pair needs for each cell; none for others, and where nothing tells
    reason: str = ""  # why cells are not comparable

    @property
    def text(self) -> str:
        """One sentence."""
        if self.outcome == "not comparable":
            return f"{self.cell} and {self.base} are not comparable: {self.reason}"
        if self.outcome == "not enough to rank" or self.difference is None or self.improvement is None:
            seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds of at least {LEAST_SEEDS}"
            return f"{self.cell} beside {self.base}: not enough to rank, {seeds}"
        outcome = self.outcome if self.more is None else f"undecided, about {self.more} more seeds"
        return (f"{self.cell} beside {self.base}: {outcome}; interquartile means differ by {self.difference.text}; "
                f"probability of improvement {self.improvement.text}; {self.seeds[0]} and {self.seeds[1]} seeds, margin {self.margin:.4g}")


def interquartile_mean(values: Floats) -> Floats:
    """Mean without the lowest and the highest quarter of values [..., observations], each rounded down to whole observations."""
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1))


def interquartile(strata: Sequence[Sequence[float]], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The interquartile mean over all observations of all strata (tasks, for example), with an interval for which each stratum is
    resampled by itself. One stratum is the usual case: the final values of the seeds. The number of observations is that of the smallest
    stratum where tails are expanded."""
    arrays = [np.asarray(stratum, dtype=np.float64) for stratum in strata]
    value = float(interquartile_mean(np.concatenate(arrays)))
    if max(map(len, arrays)) < 2:
        return Estimate(value, None)
    columns = [array[draws(len(array), resamples, seed + number)] for number, array in enumerate(arrays)]
    return Estimate(value, expanded_percentile(interquartile_mean(np.concatenate(columns, axis=-1)), list(map(len, arrays)), level))


def difference(
    ours: Sequence[float], reference: Sequence[float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Interquartile mean of ``ours`` minus that of ``reference``, each resampled by itself."""
    arrays = [np.asarray(values, dtype=np.float64) for values in (ours, reference)]
    means = [interquartile_mean(array) for array in arrays]
    sampled = [interquartile_mean(array[draws(len(array), resamples, seed + number)]) for number, array in enumerate(arrays)]
    return Estimate(float(means[0] - means[1]), expanded_percentile(sampled[0] - sampled[1], list(map(len, arrays)), level))


def probability_of_improvement(ours: Sequence[float], reference: Sequence[float], *, level: float = 0.95) -> Estimate:
    """P(X > Y) of an observation of ``ours`` and one of ``reference``, ties counted half.

    The interval is method 5 of Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic", Statistics
    in Medicine 25, 2006: the probabilities that lie within z of their own standard errors. A bootstrap has no width where all of one side
    are above the other, which happens with few seeds.
    """
    first, second = np.asarray(ours, dtype=np.float64)[:, None], np.asarray(reference, dtype=np.float64)[None, :]
    value = float(((first > second) + 0.5 * (first == second)).mean())
    z = NORMAL.inv_cdf((1 + level) / 2)
    low, high = (_reach(value, end, z, first.size, second.size) for end in (0.0, 1.0))
    return Estimate(value, Interval(low, high, level, "Newcombe"))


def _reach(value: float, end: float, z: float, first: int, second: int) -> float:
    """The probability farthest from ``value`` towards ``end`` that is within z of its own standard errors of it."""
    near, far = value, end
    for _ in range(60):
        middle = (near + far) / 2
        within = abs(middle - value) <= z * math.sqrt(_variance(middle, first, second))
        near, far = (middle, far) if within else (near, middle)
    return far


def _variance(theta: float, first: int, second: int) -> float:
    """Newcombe's variance of the Mann-Whitney probability, both sizes in the mixed terms replaced by their mean."""
    mixed = (first + second) / 2 - 1
    return theta * (1 - theta) * (1 + mixed * ((1 - theta) / (2 - theta) + theta / (1 + theta))) / (first * second)


def equivalence(ours: Sequence[float], reference: Sequence[float], margin: float) -> float:
    """The p of two one-sided tests (TOST) that means differ by less than ``margin``, with Welch's t (Schuirmann, J. Pharmacokinetics and
    Biopharmaceutics 15, 1987): below 0.05 they are equivalent. Each side has two or more observations."""
    mean, error, freedom = _welch(ours, reference)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return t_tail((margin - abs(mean)) / error, freedom)


def _welch(ours: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Difference of means, its standard error, and Welch's degrees of freedom."""
    arrays = [np.asarray(values, dtype=np.float64) for values in (ours, reference)]
    squares = [float(array.var(ddof=1)) / len(array) for array in arrays]
    top = max(squares)
    weights = [square / top if top else 0.0 for square in squares]  # scaled, so that no square overflows or vanishes
    below = sum(weight**2 / (len(array) - 1) for weight, array in zip(weights, arrays, strict=True))
    freedom = sum(weights) ** 2 / below if below else math.inf
    return float(arrays[0].mean() - arrays[1].mean()), math.sqrt(sum(squares)), freedom


def ranked(
    cell: Cell, base: Cell, *, margin: float = 0.0, higher: bool = True, resamples: int = RESAMPLES, seed: int = 0
) -> Ranking:
    """Compare two cells by their final values. ``higher``: larger values are better.

    Equivalent where the two one-sided tests reject at 5 %, even where the interval leaves out 0; otherwise better or worse where the 95 %
    interval of the difference of interquartile means leaves out 0.
    """
    ours, reference = cell.final, base.final
    seeds = (len(ours), len(reference))
    reason = cell.unusable or base.unusable
    if reason or min(seeds) < LEAST_SEEDS:
        outcome: Outcome = "not comparable" if reason else "not enough to rank"
        return Ranking(cell.name, base.name, outcome, seeds, None, None, math.nan, margin, None, reason)
    gain = difference(ours, reference, resamples=resamples, seed=seed)
    p = equivalence(ours, reference, margin) if margin > 0 else math.nan
    outcome = "equivalent within the margin" if p < 0.05 else _direction(gain, higher)
    more = _more(ours, reference, margin) if outcome == "undecided" else None
    chance = probability_of_improvement(*((ours, reference) if higher else (reference, ours)))
    return Ranking(cell.name, base.name, outcome, seeds, gain, chance, p, margin, more)


def _direction(gain: Estimate, higher: bool) -> Outcome:
    assert gain.interval is not None  # there are enough seeds
    if gain.interval.low <= 0 <= gain.interval.high:
        return "undecided"
    return "better" if (gain.value > 0) == higher else "worse"


def _more(ours: Sequence[float], reference: Sequence[float], margin: float) -> int | None:
    """About how many more seeds each cell needs: until the margin, or the difference of means less its standard error where that is
    larger, is found with a chance of 0.8. None where neither is above 0."""
    mean, error, freedom = _welch(ours, reference)
    effect = max(margin, abs(mean) - error)
    if effect <= 0:
        return None
    seeds = min(len(ours), len(reference))
    needed = t_quantile(0.975, min(freedom, seeds - 1)) + NORMAL.inv_cdf(0.8)
    return max(1, math.ceil(seeds * min(needed * error / effect, 1e4) ** 2) - seeds)
