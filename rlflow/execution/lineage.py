"""Operations on rows: choose rows, copy columns to follow-up prompts, and join batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column, ramp
from rlflow.author.columns import TABLE, Kind, Level
from rlflow.author.node_options import ChooseOptions, ConcatOptions, Value
from rlflow.author.source_lines import call_place
from rlflow.compiler.trace.column_rules import joined_kinds, missing, no_common_prompts, unfillable
from rlflow.errors import FlowError

UNFILLED = ConcatOptions()  # one batch after another, with the columns that all have


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


OF_JOINED = ("group", "part")  # columns that joined rows get anew


def with_rows(parts: Sequence[Batch]) -> list[Batch]:
    """Return the batches that have rows, or only the first one if none has."""
    return [part for part in parts if len(part)] or [parts[0]]


def only_part(parts: Sequence[Batch], options: ConcatOptions) -> Batch | None:
    """Return the only batch with rows, as if it were the joined one, or None if there are several.

    With groups by prompt, rows are always joined.
    """
    if len(with_rows(parts)) > 1 or len(parts) == 1 or options.groups is not None:
        return None
    number = next((i for i, part in enumerate(parts) if len(part)), 0)
    axis, data = parts[number].axis, parts[number].data
    group = {"group": group_column(axis)} if all(part.axis.grouped for part in parts) else {}
    part = Data(TABLE["part"].kind, torch.full((len(axis),), number))
    names = [name for name in joined_names(parts) if name not in OF_JOINED]
    return Batch(axis, {name: data[name] for name in names} | group | {"part": part})


def joined_rows(parts: Sequence[Batch], options: ConcatOptions = UNFILLED) -> Batch:
    """Concatenate batches, keeping the columns that all of them have or that ``options`` fill.

    Raises FlowError if a column's kind differs between batches, or if a column can't be filled.
    """
    joined = JoinedAxis.of([part.axis for part in parts], options)
    parts = [Batch(part.axis, part.data | filling(part, lacking(part, parts, options))) for part in parts]
    names = [name for name in joined_names(parts) if name not in OF_JOINED]
    for name in names:
        if problem := joined_kinds(name, [part.data[name].kind for part in parts], None):
            raise FlowError(problem)
    full = with_rows(parts)
    data = {name: _joined([per_row(part.data[name], part.axis) for part in full]) for name in names}
    return Batch(joined.axis, joined.in_order(data) | joined.columns())


def joined_names(parts: Sequence[Batch]) -> list[str]:
    """Return the columns that all batches have, in the order of the first batch."""
    return [name for name in parts[0].data if all(name in part for part in parts)]


@dataclass(frozen=True)
class JoinedAxis:
    """The axis of joined rows."""

    axis: Axis
    lengths: tuple[int, ...]  # rows of each part
    # int64 [rows]: each row's number among the rows of all parts, one part after another; None if that is
    # their order anyway
    order: Tensor | None = None

    @staticmethod
    def of(parts: Sequence[Axis], options: ConcatOptions) -> JoinedAxis:
        """Join the rows of all parts. Raises FlowError if ``options`` ask for groups that there can't be."""
        lengths = tuple(map(len, parts))
        if options.groups is None:
            return JoinedAxis(Axis.join(parts), lengths)
        joined = Axis.join_groups(parts)
        if joined is None:
            raise FlowError(no_common_prompts(call_place()))
        return JoinedAxis(joined[0], lengths, joined[1])

    def in_order(self, data: Mapping[str, Data]) -> dict[str, Data]:
        """Put columns that have the rows of all parts, one part after another, into the order of the axis."""
        if self.order is None:
            return dict(data)
        return {name: each.take(self.order, self.axis) for name, each in data.items()}

    def columns(self) -> dict[str, Data]:
        """Return the columns ``part`` and, if the rows have groups, ``group``."""
        part = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        part = part if self.order is None else part[self.order]
        group = {"group": group_column(self.axis)} if self.axis.grouped else {}
        return group | {"part": Data(TABLE["part"].kind, part)}


def lacking(part: Batch, parts: Sequence[Batch], options: ConcatOptions) -> dict[str, tuple[Kind, Value]]:
    """Return the columns to fill for the rows of ``part``: name → their kind in another part, and the value."""
    found: dict[str, tuple[Kind, Value]] = {}
    for name, value in options.fill:
        other = next((each.data[name] for each in parts if name in each), None)
        if name not in part and other is not None:
            kind = other.kind
            found[name] = Kind(Level.ROW, kind.dtype) if kind.level is Level.GROUP else kind, value
    return found


def filling(part: Batch, columns: Mapping[str, tuple[Kind, Value]]) -> dict[str, Data]:
    """Return columns with one value in all rows, or in all tokens of all rows.

    ``columns``: name → kind and value. Raises FlowError if the value doesn't have the kind, or if the column
    has a value per token but the batch has no ``tokens``.
    """
    made = {}
    for name, (kind, value) in columns.items():
        if problem := unfillable(name, kind, value, call_place()):
            raise FlowError(problem)
        lengths = None
        if kind.level is Level.TOKEN:
            if "tokens" not in part:
                raise FlowError(missing("concat", "tokens", list(part.data), call_place(), None, ()))
            lengths = part.data["tokens"].row_lengths
        if kind.level is Level.TEXT:
            made[name] = Data(kind, (str(value),) * len(part))
            continue
        count = len(part) if lengths is None else int(lengths.sum())
        dtype = getattr(torch, kind.dtype or "float32")
        made[name] = Data(kind, torch.full((count,), cast("bool | int | float", value), dtype=dtype), lengths)
    return made


def _joined(pieces: Sequence[Data]) -> Data:
    first = pieces[0]
    if first.kind.level is Level.SCALAR:
        return first
    if first.kind.level is Level.TEXT:
        return replace(first, value=tuple(text for piece in pieces for text in piece.value))
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    return replace(first, value=torch.cat([piece.value for piece in pieces]), lengths=lengths)
