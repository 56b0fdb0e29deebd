"""Intervals by resampling: percentile and BCa, of statistics that take all resamples at once.

Here: draws of row numbers, and quantiles of what a statistic gives on them. Not here: which statistic answers
which question (`speed.py`, `learning.py`). Draws depend on the seed alone, so that the same observations
always have the same interval.
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
    level: float  # nominal probability of covering, such as 0.95
    # how it was computed; "no spread": all observations were the same, so that it has no width
    method: Method

    @property
    def text(self) -> str:
        """Both ends, the level and the method, such as ``0.97 … 1.02 (95 %, BCa)``."""
        return f"{self.low:.4g} … {self.high:.4g} ({100 * self.level:.4g} %, {self.method})"


@lru_cache(maxsize=16)
def draws(size: int, resamples: int, seed: int) -> NDArray[np.intp]:
    """Row numbers [resamples, size], drawn with replacement from 0 … size-1. The array is shared: it is not
    to be written to."""
    numbers = np.random.default_rng([seed, size]).integers(0, size, (resamples, size))
    numbers.flags.writeable = False
    return numbers


def medians_left_out(values: Floats) -> Floats:
    """The median without each of the values [observations] in turn; there are two or more."""
    order = np.argsort(values, kind="stable")
    ordered, count = values[order], len(values)
    middle = count // 2
    lower = np.arange(count) < middle  # those left out below the middle raise it
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
    """The middle ``level`` of a statistic's values on all resamples [resamples]."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, "percentile")


def bca(values: Floats, observed: float, left_out: Floats, level: float) -> Interval:
    """The bias-corrected and accelerated interval (Efron, "Better Bootstrap Confidence Intervals", JASA 82,
    1987).

    ``values`` [resamples], ``observed`` of all observations, ``left_out`` [observations] with each left out
    in turn. The interval is the percentile interval where the correction is not defined: all resamples on one
    side of what was observed, or no spread among ``left_out``.
    """
    if values.min() == values.max():
        return Interval(observed, observed, level, "no spread")
    # ties count half: medians have many
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
    """The quantile of the resamples that stands for the normal quantile ``z``; NaN where the acceleration
    turns the order round."""
    shrink = 1 - acceleration * (bias + z)
    return NORMAL.cdf(bias + (bias + z) / shrink) if shrink > 0 else math.nan
