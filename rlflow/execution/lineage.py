"""Operations on rows: choose rows, copy columns to follow-up prompts, and join batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column, ramp
from rlflow.author.columns import Kind, Level
from rlflow.author.node_options import ChooseOptions
from rlflow.compiler.trace.rules import joined_kinds
from rlflow.errors import FlowError


def chosen_rows(by: Tensor, axis: Axis, options: ChooseOptions) -> Tensor:
    """Return the chosen rows of an axis in row order, int64.

    Without ``options.count``, ``by`` is bool [rows] and marks the rows. With ``count``, ``by`` has a number
    per row, and the rows with the ``count`` highest numbers in the batch, or in each group, are chosen. Of
    equal numbers, the first are chosen; NaN is never chosen.
    """
    if not options.count:
        return by.bool().nonzero()[:, 0]
    order = torch.argsort(torch.where(by.isnan(), -torch.inf, by.double()), descending=True, stable=True)
    order = order[~by[order].isnan()]
    slots = axis.slots[order] if options.per == "group" else torch.zeros(len(order), dtype=torch.int64)
    order = order[torch.argsort(slots, stable=True)]
    sizes = torch.bincount(slots, minlength=1)
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[place < options.count].sort().values


def asked_data(data: Data, axis: Axis, asked: Axis) -> Data:
    """Return a column of the parent rows, repeated over their follow-up prompts.

    ``axis``: the axis of the prompts. ``asked``: the axis of the parent rows.
    """
    if data.kind.level is Level.SCALAR:
        return data
    assert axis.index is not None
    return per_row(data, asked).take(axis.index, asked)


def cut_rows(batch: Batch) -> tuple[Batch, Tensor]:
    """Return the beginnings of rows to continue from.

    The column ``until`` has a number of tokens for each row, or a bool for each token; then a beginning ends
    before each True. Returns the columns ``prompt_tokens`` and ``prefix_length`` over the new rows, and the
    number of response tokens in each beginning. Raises ValueError for a number below 0 or larger than the
    row.
    """
    tokens, until = batch.data["tokens"], batch.data["until"]
    lengths = tokens.row_lengths
    starts = lengths.cumsum(0) - lengths
    if until.kind.level is Level.TOKEN:
        flat = until.value.nonzero()[:, 0]
        rows = torch.arange(len(batch)).repeat_interleave(lengths)[flat]
        place = flat - starts[rows]
    else:
        rows, place = torch.arange(len(batch)), batch["until"]
        wrong = ((place < 0) | (place > lengths)).nonzero()[:, 0].tolist()
        if wrong:
            raise ValueError(
                f"tokens_until: found {int(place[wrong[0]])} for a row of {int(lengths[wrong[0]])} tokens, "
                "expected a number from 0 to the length of the row"
            )
    first = tokens.value[starts[rows].repeat_interleave(place) + ramp(place)]
    length = replace(until, kind=Kind(Level.ROW, "int64"), lengths=None, value=place + before(batch)[rows])
    ids = after_each(batch.data["prompt_tokens"].take(rows, batch.axis), first, place)
    return Batch(batch.axis.take(rows), {"prompt_tokens": ids, "prefix_length": length}), place


def before(batch: Batch) -> Tensor:
    """Return how many response tokens are already part of each prompt, int64 [rows]."""
    return batch["prefix_length"] if "prefix_length" in batch else torch.zeros(len(batch), dtype=torch.int64)


def after_each(data: Data, value: Tensor, lengths: Tensor) -> Data:
    """Append ``lengths`` entries of ``value`` to the rows of a ragged column."""
    total = data.row_lengths + lengths
    starts = total.cumsum(0) - total
    whole = torch.empty(int(total.sum()), dtype=data.value.dtype)
    whole[starts.repeat_interleave(data.row_lengths) + ramp(data.row_lengths)] = data.value
    whole[(starts + data.row_lengths).repeat_interleave(lengths) + ramp(lengths)] = value
    return replace(data, value=whole, lengths=total)


def whole_completions(
    decode: Callable[[Sequence[Sequence[int]]], list[str]], prompts: Batch, rows: Batch
) -> Batch:
    """Return sampled rows in which ``completion`` includes the part of the response that was in the prompt.

    The stop token that ended a response is not part of the text. ``prompts``: the prompts of the rows.
    """
    where = rows.axis.back_to(prompts.axis)
    prefix = prompts["prefix_length"][where].tolist()
    whole = prompts.data["prompt_tokens"].take(where, prompts.axis).lists()
    begun = [ids[len(ids) - count :] for ids, count in zip(whole, prefix, strict=True)]
    texts = decode([ids + more for ids, more in zip(begun, rows.data["tokens"].lists(), strict=True)])
    return Batch(rows.axis, rows.data | {"completion": replace(rows.data["completion"], value=tuple(texts))})


def per_row(data: Data, axis: Axis) -> Data:
    """Turn a value per group into a value per row."""
    if data.kind.level is not Level.GROUP:
        return data
    return replace(data, kind=Kind(Level.ROW, data.kind.dtype), value=data.value[axis.slots])


def joined_rows(parts: Sequence[Batch]) -> Batch:
    """Join the rows of all parts, with the columns that all parts have.

    Raises FlowError for a column whose kind differs between parts.
    """
    axis = Axis.join([part.axis for part in parts])
    names = [name for name in parts[0].data if name != "group" and all(name in part for part in parts)]
    for name in names:
        if problem := joined_kinds(name, [part.data[name].kind for part in parts], None):
            raise FlowError(problem)
    data = {name: _joined([per_row(part.data[name], part.axis) for part in parts]) for name in names}
    return Batch(axis, data | group_of_joined(axis, parts))


def group_of_joined(axis: Axis, parts: Sequence[Batch]) -> dict[str, Data]:
    """Return the column ``group`` of joined rows if all parts have groups, else nothing."""
    return {"group": group_column(axis)} if all(part.axis.grouped for part in parts) else {}


def _joined(pieces: Sequence[Data]) -> Data:
    first = pieces[0]
    if first.kind.level is Level.SCALAR:
        return first
    if first.kind.level is Level.TEXT:
        return replace(first, value=tuple(text for piece in pieces for text in piece.value))
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    return replace(first, value=torch.cat([piece.value for piece in pieces]), lengths=lengths)
