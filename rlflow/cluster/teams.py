"""Ranks that compute together: which of a pool are asked with which rows, and whose answers count.

A tensor-parallel team is one data-parallel rank: its first rank holds its rows and its results; the others are given copies of the rows
and give results that nobody keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.cluster.layout import NONE
from rlflow.placement import Parallel

PLAIN = Parallel()


def teams(split: Sequence[Tensor], lies: Parallel) -> list[Tensor]:
    """The rows of each team from those of each rank."""
    if lies.tensor == 1:
        return list(split)
    return [torch.cat(list(split[first : first + lies.tensor])).sort().values for first in range(0, len(split), lies.tensor)]


def first_ranks(rows: Sequence[Tensor], lies: Parallel) -> list[Tensor]:
    """The rows of each rank from those of each team."""
    if lies.tensor == 1:
        return list(rows)
    return [team if number == 0 else NONE for team in rows for number in range(lies.tensor)]


def used(split: Sequence[Tensor]) -> list[int]:
    """The ranks that have rows, rank 0 where there are none at all."""
    return [rank for rank, rows in enumerate(split) if len(rows)] or [0]


def asked(split: Sequence[Tensor], lies: Parallel) -> Mapping[int, Tensor]:
    """The rows with which each rank is asked that is: those of its team."""
    firsts = range(0, len(split), lies.tensor) if lies.collective else used(split)
    return {rank: split[first] for first in firsts for rank in range(first, first + lies.tensor)}
