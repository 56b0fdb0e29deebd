"""Join rows from several shards or frames, copying each long row only once.

If a frame in shared memory contains exactly the rows needed, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlflow.author.batch import LONG, Batch, Data
from rlflow.author.copy_on_write import file_memory
from rlflow.execution.wire.column_wire import runs
from rlflow.execution.wire.row_bytes import widened

Part = tuple[Batch, Tensor | None]  # columns, and row numbers; None: all rows in their order


def gathered(parts: Sequence[Part], names: Sequence[str], order: Tensor | None = None) -> Batch:
    """Return the columns ``names`` of all parts as one batch.

    The parts are joined one after another, and then sorted into ``order`` if given. The result has its own
    memory, unless it's a single part in shared memory with its rows unchanged.
    """
    if len(parts) == 1 and parts[0][1] is None and order is None:
        return owned(parts[0][0].select(*names))
    long = [name for name in names if _long([batch.data[name] for batch, _ in parts])]
    others = [name for name in names if name not in long]
    rest = _joined([(batch.select(*others), rows) for batch, rows in parts], order)
    columns = {name: _column([(batch.data[name], rows) for batch, rows in parts], order) for name in long}
    return Batch(rest.axis, {name: columns[name] if name in columns else rest.data[name] for name in names})


def _long(pieces: Sequence[Data]) -> bool:
    """Return whether a column's rows are so long that they should be copied one by one."""
    return all(
        data.lengths is not None and len(data.value) >= LONG * len(data.lengths) > 0 for data in pieces
    )


def _joined(parts: Sequence[Part], order: Tensor | None) -> Batch:
    batches = [batch if rows is None else batch.rows(rows) for batch, rows in parts]
    whole = batches[0] if len(batches) == 1 else Batch.concat(batches)
    copied = len(batches) > 1 or parts[0][1] is not None
    if order is not None:
        whole, copied = whole.rows(order), True
    return (
        Batch(whole.axis, {name: widened(data) for name, data in whole.data.items()})
        if copied
        else owned(whole)
    )


def _column(pieces: Sequence[tuple[Data, Tensor | None]], order: Tensor | None) -> Data:
    """Join pieces of a column that has long rows, and return the column."""
    first = pieces[0][0]
    lengths = [data.lengths if rows is None else data.lengths[rows] for data, rows in pieces]  # type: ignore[index]
    if order is None:
        views = [view for data, rows in pieces for view in _views(data, rows)]
        return _copied(first, views, torch.cat(lengths))  # type: ignore[arg-type]
    each = [view for data, rows in pieces for view in _each(data, rows)]
    return _copied(first, [each[row] for row in order.tolist()], torch.cat(lengths)[order])  # type: ignore[arg-type]


def _views(data: Data, rows: Tensor | None) -> Sequence[Tensor]:
    return (data.value,) if rows is None else runs(data.value, data.row_lengths, rows)


def _each(data: Data, rows: Tensor | None) -> Sequence[Tensor]:
    """Return a view of each of the ``rows`` of a column, by default of all."""
    views = data.split()
    return views if rows is None else [views[row] for row in rows.tolist()]


def _copied(like: Data, views: Sequence[Tensor], lengths: Tensor) -> Data:
    data = replace(like, value=torch.cat(list(views)), lengths=lengths)
    return widened(data)


def owned(batch: Batch) -> Batch:
    """Return a batch from ``RowMailbox.opened`` with its values copied out of Ray's memory.

    Values in shared memory aren't copied.
    """
    return Batch(batch.axis, {name: _owned(data) for name, data in batch.data.items()})


def _owned(data: Data) -> Data:
    wide = widened(data)
    if wide is not data or not isinstance(data.value, Tensor) or file_memory(data.value) is not None:
        return wide
    return replace(data, value=data.value.clone())
