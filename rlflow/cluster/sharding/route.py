"""From a batch on workers and the rows that one rank needs of it to what that rank is told, and what others must send it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.batch import Batch
from rlflow.cluster.rpc.message import Index, Inputs, ShardRows, Source
from rlflow.cluster.sharding.shard_map import RemoteColumn, ShardMap, WorkerId
from rlflow.columns import Kind, Level


class Transfer(NamedTuple):
    """Rows of columns that another worker sends."""

    at: WorkerId
    key: int
    names: tuple[str, ...]
    rows: Index | None


class RowRequest(NamedTuple):
    """The inputs of a rank's call as its message names them, and the transfers that come with the call, in the order in which parts of
    the inputs name them."""

    inputs: Inputs
    transfers: tuple[Transfer, ...]


class AlignedColumns(NamedTuple):
    """Columns that lie side by side, and so are moved together. columns: (name wanted, name in the shards); names: each of the latter
    once."""

    layout: ShardMap
    columns: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]


class Routes:
    """A batch whose columns lie on workers, but for its scalars: what holds for every rank that needs rows of it, found once."""

    def __init__(self, batch: Batch) -> None:
        self.axis = batch.axis
        self.scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
        self.groups = [_described(layout, columns) for layout, columns in _alike(batch)]

    def to(self, rows: Tensor, at: WorkerId) -> RowRequest:
        """The rows ``rows`` for the worker ``at``."""
        transfers: list[Transfer] = []
        sources = [_source(group, rows, at, transfers) for group in self.groups]
        keys = None if self._known(sources) else self.axis.keys[rows].numpy()
        return RowRequest(Inputs(keys, self.axis.grouped, sources, self.scalars), tuple(transfers))

    def _known(self, sources: Sequence[Source]) -> bool:
        """Whether the first columns come from one shard that has just the rows, by the same keys."""
        if not sources or self.groups[0].layout.axis is not self.axis or len(sources[0].parts) != 1:
            return False
        part = sources[0].parts[0]
        return part.key is not None and part.rows is None


def _alike(batch: Batch) -> list[tuple[ShardMap, list[tuple[str, RemoteColumn]]]]:
    """The columns of a batch on workers, grouped by the map of their shards, so that each map is searched once."""
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
    return AlignedColumns(layout, wanted, tuple(dict.fromkeys(name for _, name in wanted)), tuple(data.kind for _, data in columns))


def _source(group: AlignedColumns, rows: Tensor, at: WorkerId, transfers: list[Transfer]) -> Source:
    parts: list[ShardRows] = []
    order: list[Tensor] = []
    for number, wanted, index in _pieces(group.layout, rows):
        shard = group.layout.shards[number]
        order.append(wanted)
        if shard.at == at:
            parts.append(ShardRows(shard.key, index))
        else:
            parts.append(ShardRows(None))
            transfers.append(Transfer(shard.at, shard.key, group.names, index))
    return Source(group.columns, parts, _order(order), () if parts else group.kinds)


def _pieces(layout: ShardMap, rows: Tensor) -> Iterator[tuple[int, Tensor, Index | None]]:
    """The shards that have some of ``rows``: the number of each shard, the places of its rows among ``rows``, and their places in the
    shard (None: all of it in order). There is at most one piece per rank and earlier split."""
    alone = layout.whole(rows)
    if alone is not None:
        yield alone, rows, None
        return
    part = layout.take(rows)
    for number in torch.unique(part.shard).tolist():
        wanted = (part.shard == number).nonzero()[:, 0]
        yield number, wanted, _index(part.place[wanted], layout.shards[number].rows)


def _index(place: Tensor, rows: int) -> Index | None:
    """Rows within a shard; None for all of them in their order."""
    whole = len(place) == rows and torch.equal(place, torch.arange(rows))
    return None if whole else place.numpy()


def _order(parts: Sequence[Tensor]) -> Index | None:
    """How rows that come part by part are put into their order."""
    if len(parts) < 2:
        return None
    back: Index = torch.cat(list(parts)).argsort().numpy()
    return back
