"""The driver's view of a column on workers: which shard has which row. It doesn't contain the values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from rlflow.author.axis import Axis, stacked
from rlflow.author.batch import Batch, Data

CACHED_SPLITS = 32  # splits with cached results
NONE = torch.zeros(0, dtype=torch.int64)


class WorkerId:
    """Identifies a worker: rank ``rank`` of the pool ``pool``."""

    __slots__ = ("pool", "rank")

    def __init__(self, pool: str, rank: int) -> None:
        self.pool, self.rank = pool, rank

    def __repr__(self) -> str:
        return f"rank {self.rank} of pool '{self.pool}'"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerId) and (self.pool, self.rank) == (other.pool, other.rank)

    def __hash__(self) -> int:
        return hash((self.pool, self.rank))


class Shard:
    """Rows of some columns that a worker stores under a key.

    ``at``: the worker. ``release``: called with the worker and the key when the driver no longer uses the
    shard. ``copies``: copies of the rows on other workers.
    """

    __slots__ = ("__weakref__", "_release", "at", "copies", "key", "rows")

    def __init__(self, at: WorkerId, key: int, rows: int, release: Callable[[WorkerId, int], None]) -> None:
        self.at, self.key, self.rows, self._release = at, key, rows, release
        self.copies: list[ShardCopy] = []

    def __del__(self) -> None:
        self._release(self.at, self.key)


class ShardCopy(NamedTuple):
    """A copy of some of a shard's rows and columns, on a worker that got them from another one."""

    shard: Shard
    names: frozenset[str]
    # int64 [rows of the copied shard]: the place of each row in ``shard``, -1 if it is missing
    where: Tensor
    iteration: int  # workers forget the copy at the end of this iteration

    def rows(self, index: Tensor | None) -> Tensor | None:
        """Return where rows of the copied shard are in this copy, or None if some of them are missing.

        ``index``: the places of the rows in the copied shard, or None for all rows.
        """
        places = self.where if index is None else self.where[index]
        return None if bool((places < 0).any()) else places


@dataclass(frozen=True, eq=False)
class ShardMap:
    """Maps each row of a column to the shard that has it, and to its place in that shard."""

    shards: tuple[Shard, ...]
    shard: Tensor  # int64 [rows]: the number of each row's shard
    place: Tensor  # int64 [rows]: the row within that shard
    # rows of each shard in its order, if shards hold only rows of this map; saves searches
    rows_by_shard: tuple[Tensor, ...] = ()
    axis: Axis | None = None  # row axis, as the workers with the shards have it

    def __len__(self) -> int:
        return len(self.shard)

    @staticmethod
    def of(shards: Sequence[Shard], split: Sequence[Tensor], rows: int, axis: Axis | None = None) -> ShardMap:
        """Return the map in which shard i has the rows ``split[i]``, in that order.

        ``rows``: the total number of rows.
        """
        return ShardMap(tuple(shards), *_places(tuple(split), rows), tuple(split), axis)

    def whole(self, rows: Tensor) -> int | None:
        """Return the index of the shard with exactly these rows in this order, or None if there is none."""
        number = next(
            (number for number, shard_rows in enumerate(self.rows_by_shard) if shard_rows is rows), None
        )
        if number is not None:  # the usual case, and much faster
            return number
        return next(
            (number for number, shard_rows in enumerate(self.rows_by_shard) if torch.equal(shard_rows, rows)),
            None,
        )

    def take(self, index: Tensor) -> ShardMap:
        """Return the map for the rows at ``index``."""
        return ShardMap(self.shards, self.shard[index], self.place[index])

    def split(self, pool: str, ranks: int) -> list[Tensor] | None:
        """Return the row indices of each rank of a pool, or None if some rows aren't on the pool."""
        if any(shard.at.pool != pool for shard in self.shards):
            return None
        ranks_of = [shard.at.rank for shard in self.shards]
        if self.rows_by_shard and len(set(ranks_of)) == len(ranks_of):
            rows_by_rank = dict(zip(ranks_of, self.rows_by_shard, strict=True))
            if _ascending(self.rows_by_shard):
                return [rows_by_rank.get(number, NONE) for number in range(ranks)]
        rank = torch.tensor([shard.at.rank for shard in self.shards], dtype=torch.int64)[self.shard]
        return [(rank == number).nonzero()[:, 0] for number in range(ranks)]

    def same(self, other: ShardMap) -> bool:
        """Return whether both maps have every row in the same place."""
        equal = torch.equal
        return self is other or (
            self.shards == other.shards and equal(self.shard, other.shard) and equal(self.place, other.place)
        )

    @staticmethod
    def concat(layouts: Sequence[ShardMap]) -> ShardMap:
        """Join several maps into one, with their rows one after another."""
        shards = tuple(shard for layout in layouts for shard in layout.shards)
        starts = torch.tensor([0, *(len(layout.shards) for layout in layouts)]).cumsum(0).tolist()
        number = torch.cat([layout.shard + start for layout, start in zip(layouts, starts, strict=False)])
        return ShardMap(shards, number, torch.cat([layout.place for layout in layouts]))


@functools.lru_cache(maxsize=CACHED_SPLITS)
def _places(split: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
    """Return the index of each row's shard, and each row's place in its shard, both int64 [rows].

    ``split``: the row indices of each shard. Results are cached by the identity of these tensors, because
    consecutive stages use the same split.
    """
    shard, place = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    for number, rows_held in enumerate(split):
        shard[rows_held], place[rows_held] = number, torch.arange(len(rows_held))
    return shard, place


@functools.lru_cache(maxsize=CACHED_SPLITS)
def _ascending(split: tuple[Tensor, ...]) -> bool:
    return all(bool((rows.diff() > 0).all()) for rows in split)


@dataclass(frozen=True, eq=False)
class RemoteColumn(Data):
    """A column on workers that can be used like a ``Data``. Its ``value`` is a ShardMap."""

    name: str = ""  # name of the column in its shards
    size: int = 0  # bytes of the values on all workers

    @property
    def layout(self) -> ShardMap:
        """The map from the column's rows to their places on workers."""
        layout: ShardMap = self.value
        return layout

    @property
    def nbytes(self) -> int:
        """The size in bytes of the column's values, on all workers together."""
        return self.size

    def padded(self, axis: Axis) -> NoReturn:
        """Raise TypeError, because the values aren't in this process."""
        raise TypeError(
            f"the values of column '{self.name}' are on workers: read them in a stage, or get them with Engine.fetch"
        )

    def take(self, index: Tensor, axis: Axis) -> RemoteColumn:
        """Return the column for the rows at ``index``. Values on workers don't move."""
        share = self.size * len(index) // max(len(self.layout), 1)
        lengths = self.lengths[index] if self.lengths is not None else None
        return replace(self, value=self.layout.take(index), lengths=lengths, size=share)


def joined(batches: Sequence[Batch], axis: Axis | None = None) -> Batch:
    """Join the rows of several batches that have the same columns. Values on workers don't move.

    ``axis``: the row axis of the result. By default, it's made from the keys of the batches.
    """
    first = batches[0]
    if axis is None:
        axis = Axis(stacked([batch.axis.keys for batch in batches]), grouped=first.axis.grouped)
    return Batch(axis, {name: _joined([batch.data[name] for batch in batches]) for name in first.data})


def _joined(pieces: Sequence[Data]) -> Data:
    first = pieces[-1]
    if not isinstance(first, RemoteColumn):
        return first
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    layout = ShardMap.concat([piece.value for piece in pieces])
    return replace(first, value=layout, lengths=lengths, size=sum(piece.nbytes for piece in pieces))


def row_tokens(columns: Mapping[str, Data], rows: int) -> Tensor:
    """Return each row's weight for balancing, int64 [rows]: its own tokens plus those of its prompt.

    Without token columns, the weights are the lengths of some other ragged column. Without any ragged column,
    every weight is 1.
    """
    present = [columns[name] for name in ("tokens", "prompt_tokens") if name in columns]
    token_counts = [data.lengths for data in present if data.lengths is not None]
    if not token_counts:
        token_counts = [data.lengths for data in columns.values() if data.lengths is not None][:1]
    total: Tensor = (
        sum(token_counts[1:], token_counts[0].clone())
        if token_counts
        else torch.ones(rows, dtype=torch.int64)
    )
    return total
