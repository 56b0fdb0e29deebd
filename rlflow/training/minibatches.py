"""Split the rows of an epoch into minibatches (one optimizer step each), and a minibatch into micro-batches
(one forward pass each).

Rows are split by unit. A unit is a single row, or a whole group if the loss takes whole groups, and is
represented by an int64 tensor of row indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlflow.author.seeds import permutation


def units_of(groups: Tensor) -> list[Tensor]:
    """Return the row indices of each group as a tensor (a unit).

    groups: int64 [rows], the number of each row's group, from 0 and never decreasing.
    """
    sizes = torch.bincount(groups) if len(groups) else groups
    return list(torch.split(torch.arange(len(groups)), sizes.tolist()))


def minibatches(
    units: Sequence[Tensor], *, rows: int | None, seed: int, epoch: int
) -> Iterator[list[Tensor]]:
    """Yield the units of each minibatch of an epoch, in an order drawn from ``seed`` and ``epoch``. A unit is
    a tensor of row indices that must stay together: a row or a group.

    A minibatch has at most ``rows`` rows, or a single larger unit, and the last one may be smaller. If
    ``rows`` is None, one minibatch has all rows.
    """
    order = (units[i] for i in permutation(len(units), seed, epoch).tolist())
    return _filled(order, lambda first: rows or math.inf)


def microbatches(units: Sequence[Tensor], lengths: Tensor, *, tokens: int) -> Iterator[list[Tensor]]:
    """Yield the units of each micro-batch. A unit is a tensor of row indices that must stay together: a row
    or a group.

    Each micro-batch has units of similar length, and the longest come first. It has at most ``tokens`` tokens
    including padding, or a single unit. ``lengths`` has the length of each row in tokens, int64 [rows].
    """
    longest = [int(lengths[unit].max()) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-longest[i], int(units[i][0])))
    width = {int(units[i][0]): max(longest[i], 1) for i in order}
    return _filled((units[i] for i in order), lambda first: tokens // width[int(first[0])])


def _filled(units: Iterable[Tensor], capacity: Callable[[Tensor], float]) -> Iterator[list[Tensor]]:
    """Yield lists of consecutive units (tensors of row indices). A list has at most as many rows as
    ``capacity`` returns for its first unit, but always at least one unit."""
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
