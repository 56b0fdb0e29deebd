"""Rows of rows, once they are real: which are chosen, what asked rows take along, how batches are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.columns import Kind, Level, standard_kind
from rlflow.errors import FlowError
from rlflow.trace.rules import joined_kinds


def chosen_rows(by: Tensor, axis: Axis, settings: Mapping[str, Any]) -> Tensor:
    """int64: the rows of an axis that a bool [rows] marks, or the ``count`` highest numbers [rows] of the batch or of each group, in the
    order of the rows. Of equal numbers the first go first; NaN is never chosen."""
    if not settings["count"]:
        return by.bool().nonzero()[:, 0]
    order = torch.argsort(torch.where(by.isnan(), -torch.inf, by.double()), descending=True, stable=True)
    order = order[~by[order].isnan()]
    slots = axis.slots[order] if settings["per"] == "group" else torch.zeros(len(order), dtype=torch.int64)
    order = order[torch.argsort(slots, stable=True)]
    sizes = torch.bincount(slots, minlength=1)
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[place < settings["count"]].sort().values


def asked_data(data: Data, axis: Axis, asked: Axis) -> Data:
    """A column of the rows that asked, over ``axis``, the rows that were asked."""
    if data.kind.level is Level.SCALAR:
        return data
    assert axis.index is not None
    return per_row(data, asked).take(axis.index, asked)


def per_row(data: Data, axis: Axis) -> Data:
    """A value per row in place of one per group."""
    if data.kind.level is not Level.GROUP:
        return data
    return replace(data, kind=Kind(Level.ROW, data.kind.dtype), value=data.value[axis.slots])


def joined_rows(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts with the columns that all have. Raises FlowError for a column of several kinds."""
    axis = Axis.join([part.axis for part in parts])
    names = [name for name in parts[0].data if name != "group" and all(name in part for part in parts)]
    for name in names:
        if problem := joined_kinds(name, [part.data[name].kind for part in parts], None):
            raise FlowError(problem)
    data = {name: _joined([per_row(part.data[name], part.axis) for part in parts]) for name in names}
    return Batch(axis, data | group_of_joined(axis, parts))


def group_of_joined(axis: Axis, parts: Sequence[Batch]) -> dict[str, Data]:
    """The column ``group`` of joined rows, where all parts have groups."""
    kind = standard_kind("group")
    assert kind is not None
    return {"group": Data(kind, axis.group_numbers)} if all(part.axis.grouped for part in parts) else {}


def _joined(pieces: Sequence[Data]) -> Data:
    first = pieces[0]
    if first.kind.level is Level.SCALAR:
        return first
    if first.kind.level is Level.TEXT:
        return replace(first, value=tuple(text for piece in pieces for text in piece.value))
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    return replace(first, value=torch.cat([piece.value for piece in pieces]), lengths=lengths)
