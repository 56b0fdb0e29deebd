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
from rlflow.compiler.trace.column_rules import joined_kinds
from rlflow.errors import FlowError


def chosen_rows(by: Tensor, axis: Axis, options: ChooseOptions) -> Tensor:
    """Return the indices of the chosen rows, int64, in row order.

    If ``options.count`` is 0, ``by`` is bool [rows] and marks the chosen rows. Otherwise, ``by`` has a number
    per row, and the ``count`` rows with the largest numbers are chosen, from the batch or from each group.
    Ties go to the earlier row. NaN is never chosen.
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
    """Copy a column from the source rows to their follow-up prompts.

    ``axis``: the axis of the follow-up prompts. ``asked``: the axis of the source rows.
    """
    if data.kind.level is Level.SCALAR:
        return data
    assert axis.index is not None
    return per_row(data, asked).take(axis.index, asked)


def cut_rows(batch: Batch) -> tuple[Batch, Tensor]:
    """Return prompts that continue responses, and the number of response tokens in each.

    The column ``until`` says where to cut. If it has a number per row, each row gives one prompt, with that
    many response tokens. If it has a bool per token, each True gives a prompt, with the response tokens
    before it. The prompts have the columns ``prompt_tokens`` and ``prefix_length``. Raises ValueError if a
    number is negative or larger than the row.
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
    """Return how many tokens at the end of each prompt belong to a response, int64 [rows]."""
    return batch["prefix_length"] if "prefix_length" in batch else torch.zeros(len(batch), dtype=torch.int64)


def after_each(data: Data, value: Tensor, lengths: Tensor) -> Data:
    """Append entries to each row of a ragged column: row i gets the next ``lengths[i]`` of them.

    ``value``: the entries of all rows, one row after another.
    """
    total = data.row_lengths + lengths
    starts = total.cumsum(0) - total
    whole = torch.empty(int(total.sum()), dtype=data.value.dtype)
    whole[starts.repeat_interleave(data.row_lengths) + ramp(data.row_lengths)] = data.value
    whole[(starts + data.row_lengths).repeat_interleave(lengths) + ramp(lengths)] = value
    return replace(data, value=whole, lengths=total)


def whole_completions(
    decode: Callable[[Sequence[Sequence[int]]], list[str]], prompts: Batch, rows: Batch
) -> Batch:
    """Return the sampled rows with the complete response as ``completion``.

    This includes the part of the response that was in the prompt, but not the stop token that ended it.
    ``prompts``: the prompts of the rows.
    """
    where = rows.axis.back_to(prompts.axis)
    prefix = prompts["prefix_length"][where].tolist()
    whole = prompts.data["prompt_tokens"].take(where, prompts.axis).lists()
    begun = [ids[len(ids) - count :] for ids, count in zip(whole, prefix, strict=True)]
    texts = decode([ids + more for ids, more in zip(begun, rows.data["tokens"].lists(), strict=True)])
    return Batch(rows.axis, rows.data | {"completion": replace(rows.data["completion"], value=tuple(texts))})


def per_row(data: Data, axis: Axis) -> Data:
    """Return a group column as a row column, and any other column unchanged."""
    if data.kind.level is not Level.GROUP:
        return data
    return replace(data, kind=Kind(Level.ROW, data.kind.dtype), value=data.value[axis.slots])


def with_rows(parts: Sequence[Batch]) -> list[Batch]:
    """Return the batches that have rows, or only the first one if none has."""
    return [part for part in parts if len(part)] or [parts[0]]


def only_part(parts: Sequence[Batch]) -> Batch | None:
    """Return the only batch with rows, as if it were the joined one, or None if there are several."""
    filled = with_rows(parts)
    if len(filled) > 1 or len(parts) == 1:
        return None
    [part] = filled
    return Batch(part.axis, part.data | group_of_joined(part.axis, [part]))


def joined_rows(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches, keeping the columns that all of them have.

    Raises FlowError if a column's kind differs between batches.
    """
    axis = Axis.join([part.axis for part in parts])
    names = [name for name in parts[0].data if name != "group" and all(name in part for part in parts)]
    for name in names:
        if problem := joined_kinds(name, [part.data[name].kind for part in parts], None):
            raise FlowError(problem)
    data = {name: _joined([per_row(part.data[name], part.axis) for part in parts]) for name in names}
    return Batch(axis, data | group_of_joined(axis, parts))


def group_of_joined(axis: Axis, parts: Sequence[Batch]) -> dict[str, Data]:
    """Return the column ``group`` of joined rows, by name, or an empty dict if a part has no groups."""
    return {"group": group_column(axis)} if all(part.axis.grouped for part in parts) else {}


def _joined(pieces: Sequence[Data]) -> Data:
    first = pieces[0]
    if first.kind.level is Level.SCALAR:
        return first
    if first.kind.level is Level.TEXT:
        return replace(first, value=tuple(text for piece in pieces for text in piece.value))
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    return replace(first, value=torch.cat([piece.value for piece in pieces]), lengths=lengths)
