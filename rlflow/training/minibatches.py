"""Divide rows: epochs into minibatches (one optimizer step each), and minibatches into micro-batches (one
forward each).

Rows are divided in units: single rows, or complete groups if the loss is over groups. A unit is an int64
tensor of row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlflow.author.seeds import permutation


def units_of(groups: Tensor) -> list[Tensor]:
    """Return one unit per group. ``groups``: int64 [rows], non-decreasing from 0. If every row has its own
    number, each unit is one row."""
    sizes = torch.bincount(groups) if len(groups) else groups
    return list(torch.split(torch.arange(len(groups)), sizes.tolist()))


def minibatches(
    units: Sequence[Tensor], *, rows: int | None, seed: int, epoch: int
) -> Iterator[list[Tensor]]:
    """Yield the units of each optimizer step, in an order drawn from (seed, epoch).

    A minibatch has at most ``rows`` rows, or a single larger unit. If ``rows`` is None, it has all rows. The
    last minibatch may be smaller.
    """
    order = (units[i] for i in permutation(len(units), seed, epoch).tolist())
    return _filled(order, lambda first: rows or math.inf)


def microbatches(units: Sequence[Tensor], lengths: Tensor, *, tokens: int) -> Iterator[list[Tensor]]:
    """Yield micro-batches of units with similar ``lengths`` [rows], longest first, each of at most ``tokens``
    padded tokens or a single unit."""
    longest = [int(lengths[unit].max()) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-longest[i], int(units[i][0])))
    width = {int(units[i][0]): max(longest[i], 1) for i in order}
    return _filled((units[i] for i in order), lambda first: tokens // width[int(first[0])])


def _filled(units: Iterable[Tensor], capacity: Callable[[Tensor], float]) -> Iterator[list[Tensor]]:
    """Yield runs of consecutive units. The first unit of a run determines the run's capacity in rows; a run
    has at least one unit."""
    rows_taken: list[Tensor] = []
    count, room = 0, 0.0
    for unit in units:
        if rows_taken and count + len(unit) > room:
            yield rows_taken
            rows_taken, count = [], 0
        if not rows_taken:
            room = capacity(unit)
        rows_taken.append(unit)
        count += len(unit)
    if rows_taken:
        yield rows_taken
