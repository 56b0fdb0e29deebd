"""How rows are cut: epochs into minibatches (one optimizer step each), minibatches into micro-batches (one
forward each).

Rows move in units: single rows, or whole groups for a loss over groups. A unit is an int64 tensor of row
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlflow.author.seeds import permutation


def units_of(groups: Tensor) -> list[Tensor]:
    """The rows of each group of int64 [rows], which is non-decreasing from 0. Single rows are groups of their
    own."""
    sizes = torch.bincount(groups) if len(groups) else groups
    return list(torch.split(torch.arange(len(groups)), sizes.tolist()))


def minibatches(
    units: Sequence[Tensor], *, rows: int | None, seed: int, epoch: int
) -> Iterator[list[Tensor]]:
    """The units of each optimizer step, in an order drawn from (seed, epoch).

    A minibatch takes units while it has at most ``rows`` rows (at least one unit); None: all. The last may be
    short.
    """
    order = (units[i] for i in permutation(len(units), seed, epoch).tolist())
    return _filled(order, lambda first: rows or math.inf)


def microbatches(units: Sequence[Tensor], lengths: Tensor, *, tokens: int) -> Iterator[list[Tensor]]:
    """Units with rows of similar ``lengths`` [rows], the longest first, while their padded size is at most
    ``tokens``."""
    longest = [int(lengths[unit].max()) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-longest[i], int(units[i][0])))
    width = {int(units[i][0]): max(longest[i], 1) for i in order}
    return _filled((units[i] for i in order), lambda first: tokens // width[int(first[0])])


def _filled(units: Iterable[Tensor], capacity: Callable[[Tensor], float]) -> Iterator[list[Tensor]]:
    """Runs of units, each with at most as many rows as its first unit says, and at least that unit."""
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
