"""How many more rounds or seeds a pair of cells needs that is undecided, and how that is said."""

from __future__ import annotations

import math

from rlflow.benchmarks.student import NORMAL, t_quantile

POWER = 0.8  # the chance with which the difference should be found after the observations that are announced
# observations; of more it is only said that there are more: nobody waits for them, and the forecast is too
# rough
FARTHEST = 1000


def observations_left(count: int, error: float, effect: float, level: float, freedom: float) -> int:
    """About how many observations are missing beside ``count`` (1 or more), so that ``effect`` is found with
    a chance of `POWER` at the confidence level ``level``: from 1 to `FARTHEST`.

    ``error``: the standard error of the difference with ``count`` observations, which falls with their root;
    ``freedom``: its degrees of freedom. An effect of 0 is never found.
    """
    needed = t_quantile((1 + level) / 2, freedom) + NORMAL.inv_cdf(POWER)
    # so many times the interval has to be narrower
    narrower = min(needed * error / effect, 1e4) if effect > 0 else 1e4
    return (
        FARTHEST
        if count * narrower**2 >= count + FARTHEST
        else max(1, math.ceil(count * narrower**2) - count)
    )


def announced(left: int, unit: str, *, least: bool = False) -> str:
    """The part of a sentence that says what is missing. ``unit``: its name in the plural; ``least``: it is no
    forecast, but what is needed at all."""
    about = "at least" if least else "more than" if left >= FARTHEST else "about"
    return f"{about} {left} more {unit.removesuffix('s') if left == 1 else unit}"
