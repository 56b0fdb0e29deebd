"""Forecast how many more rounds or seeds an undecided pair of cells needs, and describe the
forecast as text.
"""

from __future__ import annotations

import math

from rlflow.benchmarks.student import NORMAL, t_quantile

POWER = 0.8  # probability of finding the difference after the number of observations in the forecast
# a larger forecast is printed as "more than 1000", since it is too rough to be useful
FARTHEST = 1000


def observations_left(count: int, error: float, effect: float, level: float, freedom: float) -> int:
    """Return an estimate of how many more observations are needed to find ``effect``, from 1 to `FARTHEST`.

    With them, the difference is found with probability `POWER` at the confidence level ``level``. ``count``:
    number of observations so far, at least 1. ``error``: standard error of the difference after ``count``
    observations, which falls with the square root of their number. ``freedom``: degrees of freedom of this
    error. For an effect of 0, returns `FARTHEST`.
    """
    needed = t_quantile((1 + level) / 2, freedom) + NORMAL.inv_cdf(POWER)
    # factor by which the interval must become narrower
    narrower = min(needed * error / effect, 1e4) if effect > 0 else 1e4
    return (
        FARTHEST
        if count * narrower**2 >= count + FARTHEST
        else max(1, math.ceil(count * narrower**2) - count)
    )


def announced(left: int, unit: str, *, least: bool = False) -> str:
    """Return a number of missing observations as text, such as "about 3 more rounds".

    ``unit``: plural name of an observation. ``least``: whether ``left`` is a lower bound instead of a
    forecast.
    """
    about = "at least" if least else "more than" if left >= FARTHEST else "about"
    return f"{about} {left} more {unit.removesuffix('s') if left == 1 else unit}"
