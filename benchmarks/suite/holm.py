"""Several tests at once with one probability of error, by Holm's step-down procedure (Scandinavian Journal of
Statistics 6, 1979)."""

from __future__ import annotations

from collections.abc import Mapping


def holm(surprise: Mapping[str, float], alpha: float) -> dict[str, tuple[float, bool]]:
    """The level of each test at which the procedure tests it, and whether it rejects. It stops at the first
    that it keeps, and tests the rest at that level. ``surprise``: the p of each; ``alpha``: the probability
    that any is rejected wrongly."""
    levels, rejecting, level = {}, True, alpha
    for number, name in enumerate(sorted(surprise, key=lambda name: surprise[name])):
        if rejecting:
            level = alpha / (len(surprise) - number)
            rejecting = surprise[name] < level
        levels[name] = (level, rejecting)
    return levels
