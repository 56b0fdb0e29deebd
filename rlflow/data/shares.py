"""The order in which several sources of data take turns by their weights: without chance, and never a whole
prompt away from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction


def turns(weights: Sequence[Fraction], counts: Sequence[int]) -> Iterator[int]:
    """The sources whose turns come next, without end. ``counts``: the turns that each has had, by this rule
    from the start.

    After n turns a source of share w has had within 1 - 1/(2k - 2) of w n turns, for k sources (Tijdeman,
    "The chairman assignment problem", Discrete Mathematics 32, 1980): of those that are behind by 1/(2k - 2)
    of a turn or more, the one goes next that would first be behind by more than the bound; ties go to the
    first.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    counts, total, slack = list(counts), sum(shares), max(2 * len(shares) - 2, 1)
    turn = sum(counts)
    while True:
        turn += 1
        behind = [slack * (share * turn - total * count) for share, count in zip(shares, counts, strict=True)]
        due = [source for source, lag in enumerate(behind) if lag >= total]
        first = min(due, key=lambda source: Fraction((slack - 1) * total - behind[source], shares[source]))
        counts[first] += 1
        yield first
