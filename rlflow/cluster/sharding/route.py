"""Requests: how a rank gets its rows of a batch on workers, from its own shards and from other workers."""

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
    """Rows of columns that another worker sends. ``rows``: indices in that worker's shard, or None for
    all.
    """

    at: WorkerId
    key: int
    names: tuple[str, ...]
    rows: Index | None


class StoredRows(NamedTuple):
    """Rows from other workers that a worker stores as a new shard.

    ``pieces``: for each source shard, where its rows are in the new shard, and where they were in the source
    shard.
    """

    key: int
    rows: int
    names: frozenset[str]
    # shard, places among the rows, places in the shard (or None for the whole shard in order)
    pieces: tuple[tuple[Shard, Tensor, Tensor | None], ...]


class RowRequest(NamedTuple):
    """What a rank needs for a call: the inputs, the transfers from other workers, and the rows to store.

    The transfers are in the order in which the inputs use them.
    """

    inputs: Inputs
    transfers: tuple[Transfer, ...]
    copies: tuple[StoredRows, ...] = ()

    def note(
        self, at: WorkerId, iteration: int, release: Callable[[WorkerId, int], None], ended: int = -1
    ) -> None:
        """Record the copies of shards that the worker ``at`` has made for this request.

        Later requests in the same iteration use these copies. ``release``: called with a worker and a key
        when a copy is no longer used. ``ended``: copies of this iteration and earlier ones are forgotten.
        """
        for key, rows, names, pieces in self.copies:
            shard = Shard(at, key, rows, release)
            for source, wanted, index in pieces:
                where = torch.full((source.rows,), -1, dtype=torch.int64)
                where[torch.arange(source.rows) if index is None else index] = wanted
                live = [copy for copy in source.copies if copy.iteration > ended]
                source.copies = [*live, ShardCopy(shard, names, where, iteration)]


class AlignedColumns(NamedTuple):
    """Columns whose rows are in the same places on the workers, so that they can move together."""

    layout: ShardMap
    columns: tuple[tuple[str, str], ...]  # (name in the request, name in the shards)
    names: tuple[str, ...]  # names in the shards, each once
    kinds: tuple[Kind, ...]


class Routes:
    """The parts of a request that are the same for all ranks, computed once per batch on workers."""

    def __init__(self, batch: Batch) -> None:
        self.axis = batch.axis
        self.scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
        self.groups = [_described(layout, columns) for layout, columns in _alike(batch)]

    def to(
        self, rows: Tensor, at: WorkerId, iteration: int = 0, keep: Callable[[], int] | None = None
    ) -> RowRequest:
        """Return the request that gets ``rows`` for the worker ``at``.

        Rows that the worker has already copied in this ``iteration`` aren't sent again. ``keep``: a function
        that returns the key under which the worker stores incoming rows, or None if it doesn't store them.
        """
        inputs = _Inputs(rows, at, iteration, keep)
        sources = [source for group in self.groups for source in inputs.sources(group)]
        keys = None if self._known(sources) else self.axis.keys[rows].numpy()
        return RowRequest(
            Inputs(keys, self.axis.grouped, sources, self.scalars),
            tuple(inputs.transfers),
            tuple(inputs.copies),
        )

    def _known(self, sources: Sequence[Source]) -> bool:
        """Return whether the request can omit the row keys.

        It can if the first columns come from a single, whole shard with the same keys.
        """
        if not sources or self.groups[0].layout.axis is not self.axis or len(sources[0].parts) != 1:
            return False
        part = sources[0].parts[0]
        return part.key is not None and part.rows is None


def _alike(batch: Batch) -> list[tuple[ShardMap, list[tuple[str, RemoteColumn]]]]:
    """Group the columns on workers by shard map, so that each map is searched only once."""
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
    """Builds one rank's request, collecting the sources of its columns and the transfers they need."""

    def __init__(self, rows: Tensor, at: WorkerId, iteration: int, keep: Callable[[], int] | None) -> None:
        self.rows, self.at, self.iteration, self.keep = rows, at, iteration, keep
        self.transfers: list[Transfer] = []
        self.copies: list[StoredRows] = []

    def sources(self, group: AlignedColumns) -> list[Source]:
        """Return where the rank gets aligned columns: from copies on its worker if any, or from shards."""
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
        """Return this worker's copy of a column's rows in another worker's shard, or None if it has none.

        ``index``: the places of the rows in the shard, or None for all rows.
        """
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
        """Return the key under which the worker stores incoming rows, or None if it doesn't store them."""
        if not coming or self.keep is None:
            return None
        self.copies.append(StoredRows(self.keep(), len(self.rows), frozenset(names), tuple(coming)))
        return self.copies[-1].key


Piece = tuple[int, Tensor, Tensor | None]


def _pieces(layout: ShardMap, rows: Tensor) -> Iterator[Piece]:
    """For each shard that has some of ``rows``, yield its index and two sets of places.

    The first set says where these rows are in ``rows``, and the second says where they are in the shard, or
    is None for the whole shard in its own order.
    """
    alone = layout.whole(rows)
    if alone is not None:
        yield alone, torch.arange(len(rows)), None
        return
    part = layout.take(rows)
    for number in torch.unique(part.shard).tolist():
        wanted = (part.shard == number).nonzero()[:, 0]
        yield number, wanted, _all_or(part.place[wanted], layout.shards[number].rows)


def _all_or(place: Tensor, rows: int) -> Tensor | None:
    """Return ``place``, or None if these places are all ``rows`` rows of a shard in order."""
    return None if len(place) == rows and torch.equal(place, torch.arange(rows)) else place


def _whole_or(place: Tensor, rows: int) -> Index | None:
    index = _all_or(place, rows)
    return None if index is None else index.numpy()


def _order(parts: Sequence[Tensor]) -> Index | None:
    """Return the index that sorts the joined rows of several parts, or None if there's only one part."""
    if len(parts) < 2:
        return None
    back: Index = torch.cat(list(parts)).argsort().numpy()
    return back
