"""Bootstrap confidence intervals: percentile and BCa.

A statistic is computed for all resamples at once. Draws depend only on the seed, so the same observations
always give the same interval. `speed.py` and `learning.py` choose the statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.benchmarks.student import NORMAL

Floats = NDArray[np.float64]
Method = Literal["BCa", "percentile", "t", "Newcombe", "no spread"]


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    level: float  # nominal coverage, such as 0.95
    # how it was computed; "no spread": all observations are equal, so the interval has no width
    method: Method

    @property
    def text(self) -> str:
        """The interval as text, with level and method, such as ``0.97 … 1.02 (95 %, BCa)``."""
        return f"{self.low:.4g} … {self.high:.4g} ({100 * self.level:.4g} %, {self.method})"


@lru_cache(maxsize=16)
def draws(size: int, resamples: int, seed: int) -> NDArray[np.intp]:
    """Return indices drawn with replacement from 0 … size-1: [resamples, size].

    The array is cached and read-only.
    """
    numbers = np.random.default_rng([seed, size]).integers(0, size, (resamples, size))
    numbers.flags.writeable = False
    return numbers


def medians_left_out(values: Floats) -> Floats:
    """Return, for each value [observations], the median of all other values (jackknife).

    Needs at least two values.
    """
    order = np.argsort(values, kind="stable")
    ordered, count = values[order], len(values)
    middle = count // 2
    lower = np.arange(count) < middle  # leaving out a value below the middle raises the median
    if count % 2:
        above, below = ordered[middle : middle + 2].mean(), ordered[middle - 1 : middle + 1].mean()
        by_rank = np.where(lower, above, below)
        by_rank[middle] = (ordered[middle - 1] + ordered[middle + 1]) / 2
    else:
        by_rank = np.where(lower, ordered[middle], ordered[middle - 1])
    medians = np.empty_like(values)
    medians[order] = by_rank
    return medians


def percentile(values: Floats, level: float) -> Interval:
    """Return the percentile interval, the middle share ``level`` of a statistic's values [resamples]."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, "percentile")


def bca(values: Floats, observed: float, left_out: Floats, level: float) -> Interval:
    """Return the bias-corrected and accelerated (BCa) interval.

    Efron, "Better Bootstrap Confidence Intervals", JASA 82, 1987. ``values`` [resamples]: the statistic of
    each resample. ``observed``: the statistic of all observations. ``left_out`` [observations]: the statistic
    of all observations but one. The correction is undefined if all resamples are on one side of ``observed``,
    or if ``left_out`` has no spread. In these cases, returns the percentile interval.
    """
    if values.min() == values.max():
        return Interval(observed, observed, level, "no spread")
    # a tie counts as half, since medians have many ties
    below = (np.mean(values < observed) + np.mean(values <= observed)) / 2
    deviations = left_out.mean() - left_out
    squares = float(np.sum(deviations**2))
    if not 0 < below < 1 or squares <= 1e-24 * observed**2:
        return percentile(values, level)
    bias, acceleration = NORMAL.inv_cdf(float(below)), float(np.sum(deviations**3)) / (6 * squares**1.5)
    ends = [
        _corrected(z, bias, acceleration)
        for z in (NORMAL.inv_cdf((1 - level) / 2), NORMAL.inv_cdf((1 + level) / 2))
    ]
    if not ends[0] < ends[1]:
        return percentile(values, level)
    low, high = np.quantile(values, ends)
    return Interval(float(low), float(high), level, "BCa")


def _corrected(z: float, bias: float, acceleration: float) -> float:
    """Return the corrected probability for the normal quantile ``z``; NaN if the acceleration would reverse
    the order.
    """
    shrink = 1 - acceleration * (bias + z)
    return NORMAL.cdf(bias + (bias + z) / shrink) if shrink > 0 else math.nan
