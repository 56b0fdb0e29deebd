"""From a batch on workers and the rows that one rank needs of it to what that rank is told, and what others
must send it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.columns import Kind, Level
from rlflow.cluster.rpc.message import Index, Inputs, ShardRows, Source
from rlflow.cluster.sharding.shard_map import RemoteColumn, Shard, ShardCopy, ShardMap, WorkerId


class Transfer(NamedTuple):
    """Rows of columns that another worker sends."""

    at: WorkerId
    key: int
    names: tuple[str, ...]
    rows: Index | None


class StoredRows(NamedTuple):
    """Rows that a worker stores because they come from others: of each shard that they come from, which rows
    go to which places."""

    key: int
    rows: int
    names: frozenset[str]
    # shard, places among the rows, places in the shard (None: all of it in order)
    pieces: tuple[tuple[Shard, Tensor, Tensor | None], ...]


class RowRequest(NamedTuple):
    """The inputs of a rank's call as its message names them, the transfers that come with the call, in the
    order in which parts of the inputs name them, and the rows that the worker then keeps."""

    inputs: Inputs
    transfers: tuple[Transfer, ...]
    copies: tuple[StoredRows, ...] = ()

    def note(self, at: WorkerId, iteration: int, release: Callable[[WorkerId, int], None]) -> None:
        """Note where copies of shards are, once the worker has them."""
        for key, rows, names, pieces in self.copies:
            shard = Shard(at, key, rows, release)
            for source, wanted, index in pieces:
                where = torch.full((source.rows,), -1, dtype=torch.int64)
                where[torch.arange(source.rows) if index is None else index] = wanted
                source.copies.append(ShardCopy(shard, names, where, iteration))


class AlignedColumns(NamedTuple):
    """Columns that lie side by side, and so are moved together."""

    layout: ShardMap
    columns: tuple[tuple[str, str], ...]  # (name wanted, name in the shards)
    names: tuple[str, ...]  # those in the shards, each once
    kinds: tuple[Kind, ...]


class Routes:
    """A batch whose columns lie on workers, but for its scalars: what holds for every rank that needs rows of
    it, found once."""

    def __init__(self, batch: Batch) -> None:
        self.axis = batch.axis
        self.scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
        self.groups = [_described(layout, columns) for layout, columns in _alike(batch)]

    def to(
        self, rows: Tensor, at: WorkerId, iteration: int = 0, keep: Callable[[], int] | None = None
    ) -> RowRequest:
        """The rows ``rows`` for the worker ``at``. Copies that it has of this ``iteration`` do not come
        again. ``keep``: gives a key under which it stores what comes; None: it stores nothing."""
        inputs = _Inputs(rows, at, iteration, keep)
        sources = [source for group in self.groups for source in inputs.sources(group)]
        keys = None if self._known(sources) else self.axis.keys[rows].numpy()
        return RowRequest(
            Inputs(keys, self.axis.grouped, sources, self.scalars),
            tuple(inputs.transfers),
            tuple(inputs.copies),
        )

    def _known(self, sources: Sequence[Source]) -> bool:
        """Whether the first columns come from one shard that has just the rows, by the same keys."""
        if not sources or self.groups[0].layout.axis is not self.axis or len(sources[0].parts) != 1:
            return False
        part = sources[0].parts[0]
        return part.key is not None and part.rows is None


def _alike(batch: Batch) -> list[tuple[ShardMap, list[tuple[str, RemoteColumn]]]]:
    """The columns of a batch on workers, grouped by the map of their shards, so that each map is searched
    once."""
    by_layout: list[tuple[ShardMap, list[tuple[str, RemoteColumn]]]] = []
    for name, data in batch.data.items():
        if isinstance(data, RemoteColumn):
            group = next((columns for layout, columns in by_layout if layout.same(data.layout)), None)
            if group is None:
                by_layout.append((data.layout, group := []))
            group.append((name, data))
    return by_layout


def _described(layout: ShardMap, columns: Sequence[tuple[str, RemoteColumn]]) -> AlignedColumns:
    wanted = tuple((name, data.name) for name, data in columns)
    return AlignedColumns(
        layout,
        wanted,
        tuple(dict.fromkeys(name for _, name in wanted)),
        tuple(data.kind for _, data in columns),
    )


class _Inputs:
    """The sources of one rank's request, and what has to come for them."""

    def __init__(self, rows: Tensor, at: WorkerId, iteration: int, keep: Callable[[], int] | None) -> None:
        self.rows, self.at, self.iteration, self.keep = rows, at, iteration, keep
        self.transfers: list[Transfer] = []
        self.copies: list[StoredRows] = []

    def sources(self, group: AlignedColumns) -> list[Source]:
        """Where columns come from that lie side by side: those of which there are copies from these, the
        others from the shards."""
        pieces = list(_pieces(group.layout, self.rows))
        shards = [group.layout.shards[number] for number, _, _ in pieces]
        copies: dict[tuple[int, ...], tuple[list[str], list[ShardCopy | None]]] = {}
        for name in group.names:
            held_copies = [
                self._copy(shard, name, index) for shard, (_, _, index) in zip(shards, pieces, strict=True)
            ]
            copies.setdefault(tuple(map(id, held_copies)), ([], held_copies))[0].append(name)
        return [
            self._source(group, tuple(names), pieces, shards, held_copies)
            for names, held_copies in copies.values()
        ]

    def _copy(self, shard: Shard, name: str, index: Tensor | None) -> ShardCopy | None:
        """The copy that this worker has of some rows of a column."""
        if shard.at == self.at:
            return None
        return next(
            (
                copy
                for copy in shard.copies
                if copy.iteration == self.iteration
                and copy.shard.at == self.at
                and name in copy.names
                and copy.rows(index) is not None
            ),
            None,
        )

    def _source(
        self,
        group: AlignedColumns,
        names: tuple[str, ...],
        pieces: Sequence[Piece],
        shards: Sequence[Shard],
        copies: Sequence[ShardCopy | None],
    ) -> Source:
        parts, coming = list[ShardRows](), list[tuple[Shard, Tensor, Tensor | None]]()
        for (_, wanted, index), shard, copy in zip(pieces, shards, copies, strict=True):
            if copy is not None:
                places = copy.rows(index)
                assert places is not None
                parts.append(ShardRows(copy.shard.key, _whole_or(places, copy.shard.rows)))
            elif shard.at == self.at:
                parts.append(ShardRows(shard.key, None if index is None else index.numpy()))
            else:
                parts.append(ShardRows(None))
                self.transfers.append(
                    Transfer(shard.at, shard.key, names, None if index is None else index.numpy())
                )
                coming.append((shard, wanted, index))
        wanted_columns = [
            (own, of, kind) for (own, of), kind in zip(group.columns, group.kinds, strict=True) if of in names
        ]
        columns, kinds = (
            tuple((own, of) for own, of, _ in wanted_columns),
            tuple(kind for *_, kind in wanted_columns),
        )
        return Source(
            columns,
            parts,
            _order([wanted for _, wanted, _ in pieces]),
            () if parts else kinds,
            self._keep(names, coming),
        )

    def _keep(
        self, names: tuple[str, ...], coming: Sequence[tuple[Shard, Tensor, Tensor | None]]
    ) -> int | None:
        """The key under which what comes is stored."""
        if not coming or self.keep is None:
            return None
        self.copies.append(StoredRows(self.keep(), len(self.rows), frozenset(names), tuple(coming)))
        return self.copies[-1].key


Piece = tuple[int, Tensor, Tensor | None]


def _pieces(layout: ShardMap, rows: Tensor) -> Iterator[Piece]:
    """The shards that have some of ``rows``: the number of each shard, the places of its rows among ``rows``,
    and their places in the shard (None: all of it in order). There is at most one piece per rank and earlier
    split."""
    alone = layout.whole(rows)
    if alone is not None:
        yield alone, torch.arange(len(rows)), None
        return
    part = layout.take(rows)
    for number in torch.unique(part.shard).tolist():
        wanted = (part.shard == number).nonzero()[:, 0]
        yield number, wanted, _all_or(part.place[wanted], layout.shards[number].rows)


def _all_or(place: Tensor, rows: int) -> Tensor | None:
    """Rows within a shard; None for all of them in their order."""
    return None if len(place) == rows and torch.equal(place, torch.arange(rows)) else place


def _whole_or(place: Tensor, rows: int) -> Index | None:
    index = _all_or(place, rows)
    return None if index is None else index.numpy()


def _order(parts: Sequence[Tensor]) -> Index | None:
    """How rows that come part by part are put into their order."""
    if len(parts) < 2:
        return None
    back: Index = torch.cat(list(parts)).argsort().numpy()
    return back
