"""From a batch on workers and the rows that one rank needs of it to what that rank is told, and what others must send it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.batch import Batch
from rlflow.cluster.layout import Layout, Sharded, Where
from rlflow.cluster.message import Index, Inputs, Part, Source
from rlflow.columns import Level


@dataclass(frozen=True)
class Transfer:
    """Rows of columns that another worker sends."""

    at: Where
    key: int
    names: tuple[str, ...]
    rows: Index | None


@dataclass(frozen=True)
class Request:
    """What a rank is told of its inputs, and the transfers that come with the call, in the order in which its parts name them."""

    inputs: Inputs
    transfers: tuple[Transfer, ...]


def request(batch: Batch, rows: Tensor, at: Where) -> Request:
    """The rows ``rows`` of a batch for the worker ``at``. All columns must lie on workers, but for scalars."""
    scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
    sources: list[Source] = []
    transfers: list[Transfer] = []
    for layout, columns in _alike(batch):
        source, coming = _source(layout, rows, columns, at)
        sources.append(source)
        transfers += coming
    keys = batch.axis.keys[rows].numpy()
    return Request(Inputs(keys, batch.axis.grouped, tuple(sources), scalars), tuple(transfers))


def _alike(batch: Batch) -> list[tuple[Layout, list[tuple[str, Sharded]]]]:
    """Columns by layout, so that what lies side by side is moved together."""
    found: list[tuple[Layout, list[tuple[str, Sharded]]]] = []
    for name, data in batch.data.items():
        if isinstance(data, Sharded):
            group = next((columns for layout, columns in found if layout.same(data.layout)), None)
            if group is None:
                found.append((data.layout, group := []))
            group.append((name, data))
    return found


def _source(layout: Layout, rows: Tensor, columns: Sequence[tuple[str, Sharded]], at: Where) -> tuple[Source, list[Transfer]]:
    names = tuple(dict.fromkeys(data.name for _, data in columns))
    parts: list[Part] = []
    coming: list[Transfer] = []
    order: list[Tensor] = []
    for number, wanted, index in _pieces(layout, rows):
        shard = layout.shards[number]
        order.append(wanted)
        if shard.at == at:
            parts.append(Part(shard.key, index))
        else:
            parts.append(Part(None))
            coming.append(Transfer(shard.at, shard.key, names, index))
    described = tuple((wanted, data.name, data.kind) for wanted, data in columns)
    return Source(described, tuple(parts), _order(order)), coming


def _pieces(layout: Layout, rows: Tensor) -> Iterator[tuple[int, Tensor, Index | None]]:
    """From which shard which of ``rows`` come, by their places there; few: at most one per rank and earlier split."""
    alone = layout.whole(rows)
    if alone is not None:
        yield alone, rows, None
        return
    taken = layout.take(rows)
    for number in torch.unique(taken.shard).tolist():
        wanted = (taken.shard == number).nonzero()[:, 0]
        yield number, wanted, _index(taken.place[wanted], layout.shards[number].rows)


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
