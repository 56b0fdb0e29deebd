"""Forecast how many more rounds or seeds an undecided pair of cells needs, and word the forecast."""

from __future__ import annotations

import math

from rlflow.benchmarks.student import NORMAL, t_quantile

POWER = 0.8  # probability of finding the difference after the forecast number of observations
# a larger forecast is printed as "more than 1000": it is too rough, and nobody waits that long
FARTHEST = 1000


def observations_left(count: int, error: float, effect: float, level: float, freedom: float) -> int:
    """Estimate how many observations are missing to find ``effect``: from 1 to `FARTHEST`.

    After them the difference is found with probability `POWER` at the confidence level ``level``. ``count``:
    observations so far (1 or more); ``error``: standard error of the difference with ``count`` observations,
    which falls with the square root of their number; ``freedom``: its degrees of freedom. An effect of 0 gives
    `FARTHEST`.
    """
    needed = t_quantile((1 + level) / 2, freedom) + NORMAL.inv_cdf(POWER)
    # factor by which the interval must shrink
    narrower = min(needed * error / effect, 1e4) if effect > 0 else 1e4
    return (
        FARTHEST
        if count * narrower**2 >= count + FARTHEST
        else max(1, math.ceil(count * narrower**2) - count)
    )


def announced(left: int, unit: str, *, least: bool = False) -> str:
    """Return the missing observations in words, such as "about 3 more rounds".

    ``unit``: plural name of an observation; ``least``: ``left`` is a minimum, not a forecast.
    """
    about = "at least" if least else "more than" if left >= FARTHEST else "about"
    return f"{about} {left} more {unit.removesuffix('s') if left == 1 else unit}"
