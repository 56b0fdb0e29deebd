"""Several tests with a joint error probability, by Holm's step-down procedure (Scandinavian Journal of
Statistics 6, 1979)."""

from __future__ import annotations

from collections.abc import Mapping


def holm(surprise: Mapping[str, float], alpha: float) -> dict[str, tuple[float, bool]]:
    """Return, for each test, its level and whether it is rejected.

    The procedure stops at the first test that it does not reject; all later tests get that test's level.
    ``surprise``: p-value by test. ``alpha``: probability that any test is wrongly rejected.
    """
    levels, rejecting, level = {}, True, alpha
    for number, name in enumerate(sorted(surprise, key=lambda name: surprise[name])):
        if rejecting:
            level = alpha / (len(surprise) - number)
            rejecting = surprise[name] < level
        levels[name] = (level, rejecting)
    return levels
