"""Divide the rows of an epoch into minibatches (one optimizer step each), and a minibatch into micro-batches
(one forward pass each).

Rows are divided in units. A unit is a single row, or a complete group if the loss takes complete groups. It
is represented by an int64 tensor of row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlflow.author.seeds import permutation


def units_of(groups: Tensor) -> list[Tensor]:
    """Return the row numbers of each group as one tensor (a unit). ``groups``: int64 [rows], the number of
    each row's group, from 0, non-decreasing."""
    sizes = torch.bincount(groups) if len(groups) else groups
    return list(torch.split(torch.arange(len(groups)), sizes.tolist()))


def minibatches(
    units: Sequence[Tensor], *, rows: int | None, seed: int, epoch: int
) -> Iterator[list[Tensor]]:
    """Yield the units of each minibatch of an epoch. A unit has the numbers of rows that must stay together:
    a row, or a group. The order of the units is drawn from ``seed`` and ``epoch``.

    A minibatch has at most ``rows`` rows, or consists of a single larger unit. If ``rows`` is None, one
    minibatch has all rows. The last minibatch may be smaller.
    """
    order = (units[i] for i in permutation(len(units), seed, epoch).tolist())
    return _filled(order, lambda first: rows or math.inf)


def microbatches(units: Sequence[Tensor], lengths: Tensor, *, tokens: int) -> Iterator[list[Tensor]]:
    """Yield the units of each micro-batch. A unit has the numbers of rows that must stay together: a row, or
    a group.

    Units of similar length are in the same micro-batch, and the longest come first. A micro-batch has at most
    ``tokens`` tokens including padding, or consists of a single unit. ``lengths``: int64 [rows], the number
    of tokens of each row.
    """
    longest = [int(lengths[unit].max()) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-longest[i], int(units[i][0])))
    width = {int(units[i][0]): max(longest[i], 1) for i in order}
    return _filled((units[i] for i in order), lambda first: tokens // width[int(first[0])])


def _filled(units: Iterable[Tensor], capacity: Callable[[Tensor], float]) -> Iterator[list[Tensor]]:
    """Yield lists of consecutive units (tensors of row numbers). A list has at most as many rows as
    ``capacity`` returns for its first unit, but at least one unit."""
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
