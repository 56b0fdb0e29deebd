"""Decides, without randomness, which data source serves the next prompt.

The number of prompts from each source stays within one of its exact share by weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction


def turns(weights: Sequence[Fraction], counts: Sequence[int]) -> Iterator[int]:
    """Yield the index of the next source, endlessly.

    ``counts``: how often each source was chosen before.

    With k sources, a source with share w has had w n turns after n turns, with an error of at most
    1 - 1/(2k - 2) (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). The candidates
    for the next turn are the sources that are behind by at least 1/(2k - 2) of a turn. It goes to the candidate
    that would otherwise be the first to exceed the bound; ties go to the lowest index.
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
