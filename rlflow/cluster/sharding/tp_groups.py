"""Tensor-parallel teams: which ranks of a call get which rows, and whose answers are used.

A team is a set of tensor-parallel ranks that together act as one data-parallel rank. Its first rank stores
its rows and results. The other ranks get copies of the rows, and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.cluster.sharding.shard_map import NONE
from rlflow.compiler.placement import Parallel

PLAIN = Parallel()


def teams(split: Sequence[Tensor], parallel: Parallel) -> list[Tensor]:
    """Return the row indices of each team. ``split``: the row indices of each rank."""
    if parallel.tensor == 1:
        return list(split)
    return [torch.cat([split[rank] for rank in team]).sort().values for team in parallel.teams(len(split))]


def first_ranks(rows: Sequence[Tensor], parallel: Parallel) -> list[Tensor]:
    """Return each rank's row indices when only the first rank of each team stores rows.

    ``rows``: the row indices of each team.
    """
    if parallel.tensor == 1:
        return list(rows)
    rows_of = {
        team[0]: own for team, own in zip(parallel.teams(len(rows) * parallel.tensor), rows, strict=True)
    }
    return [rows_of.get(rank, NONE) for rank in range(len(rows) * parallel.tensor)]


def used(split: Sequence[Tensor]) -> list[int]:
    """Return the ranks that have rows, or [0] if none does."""
    return [rank for rank, rows in enumerate(split) if len(rows)] or [0]


def asked(split: Sequence[Tensor], parallel: Parallel) -> Mapping[int, Tensor]:
    """Return rank → row indices for all ranks that take part in a call.

    All ranks of a team get the rows of its first rank. If the parallelism is collective, teams without rows
    take part too.
    """
    with_rows = set(used(split))
    groups = [ranks for ranks in parallel.teams(len(split)) if parallel.collective or ranks[0] in with_rows]
    rows_of = {rank: split[ranks[0]] for ranks in groups for rank in ranks}
    return dict(sorted(rows_of.items()))
