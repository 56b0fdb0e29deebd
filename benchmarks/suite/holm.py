"""Run several tests with a joint error probability, by Holm's step-down procedure (Scandinavian Journal of
Statistics 6, 1979).
"""

from __future__ import annotations

from collections.abc import Mapping


def holm(surprise: Mapping[str, float], alpha: float) -> dict[str, tuple[float, bool]]:
    """Return (level, whether the test is rejected) for each test.

    The tests are taken in the order of their p-values. The procedure stops at the first test that it does not
    reject. All later tests get the level of that test. ``surprise``: the p-value of each test. ``alpha``:
    probability that any test is wrongly rejected.
    """
    levels, rejecting, level = {}, True, alpha
    for number, name in enumerate(sorted(surprise, key=lambda name: surprise[name])):
        if rejecting:
            level = alpha / (len(surprise) - number)
            rejecting = surprise[name] < level
        levels[name] = (level, rejecting)
    return levels
