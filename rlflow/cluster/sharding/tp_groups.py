"""Ranks that compute together: which of a pool are asked with which rows, and whose answers count.

A tensor-parallel team is one data-parallel rank: its first rank holds its rows and its results; the others are given copies of the rows
and give results that nobody keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.cluster.sharding.shard_map import NONE
from rlflow.placement import Parallel

PLAIN = Parallel()


def teams(split: Sequence[Tensor], lies: Parallel) -> list[Tensor]:
    """The rows of each team from those of each rank."""
    if lies.tensor == 1:
        return list(split)
    return [torch.cat([split[rank] for rank in team]).sort().values for team in lies.teams(len(split))]


def first_ranks(rows: Sequence[Tensor], lies: Parallel) -> list[Tensor]:
    """The rows of each rank from those of each team."""
    if lies.tensor == 1:
        return list(rows)
    held = {team[0]: own for team, own in zip(lies.teams(len(rows) * lies.tensor), rows, strict=True)}
    return [held.get(rank, NONE) for rank in range(len(rows) * lies.tensor)]


def used(split: Sequence[Tensor]) -> list[int]:
    """The ranks that have rows, rank 0 where there are none at all."""
    return [rank for rank, rows in enumerate(split) if len(rows)] or [0]


def asked(split: Sequence[Tensor], lies: Parallel) -> Mapping[int, Tensor]:
    """The rows with which each rank is asked that is: those of its team."""
    kept = set(used(split))
    told = {rank: split[team[0]] for team in lies.teams(len(split)) if lies.collective or team[0] in kept for rank in team}
    return dict(sorted(told.items()))
