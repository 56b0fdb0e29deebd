"""Batch: named columns that share one row axis, stored without padding.

Stages and losses see tensors padded on the right to the longest row of the call. ``Data.padded`` makes these
tensors, and ``Data.trimmed`` turns what a stage returns back into a column. Results must never depend on the
padding; to test that, fill it with NaN using ``padding``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis, stacked, starts
from rlflow.author.columns import TABLE, Kind, Level, standard_kind
from rlflow.author.copy_on_write import writable_copy
from rlflow.author.messages import unpacked
from rlflow.author.scope import number, with_value
from rlflow.author.source_lines import call_place
from rlflow.author.words import column_meant
from rlflow.errors import FlowError, Problem, listed

_fill: ContextVar[float] = ContextVar("padding", default=0.0)
DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


def padding(value: float) -> AbstractContextManager[None]:
    """Fill the padding of float columns with ``value`` inside the ``with`` block.

    Tests use this to show that results don't depend on the padding.
    """
    return with_value(_fill, value)


@dataclass(frozen=True, eq=False)
class Data:
    """The values of one column, without padding.

    Token and prompt columns are flat tensors, with each row's length in ``lengths``, int64 [rows]. Group
    columns have one value per group. A scalar is a 0-d tensor, or a tuple with one 0-d tensor per rank if an
    ``ALL`` stage returned it. Text is a tuple of str. If the call that computes the column isn't due in an
    iteration, the value is None there.
    """

    kind: Kind
    value: Any
    lengths: Tensor | None = None

    @property
    def ragged(self) -> bool:
        """True for token and prompt columns, whose rows can have different numbers of values."""
        return self.kind.level in (Level.TOKEN, Level.PROMPT)

    @property
    def row_lengths(self) -> Tensor:
        """The number of values in each row of a token or prompt column, int64 [rows].

        Raises TypeError for other columns.
        """
        if self.lengths is None:
            raise TypeError(f"found a {self.kind.level} column, expected one with several values per row")
        return self.lengths

    def split(self) -> tuple[Tensor, ...]:
        """Return a view of each row's values. Raises TypeError unless this is a token or prompt column."""
        return torch.split(self.value, self.row_lengths.tolist()) if len(self.row_lengths) else ()

    def lists(self) -> list[list[Any]]:
        """Return each row's values as a list. Raises TypeError unless this is a token or prompt column."""
        return [row.tolist() for row in self.split()]

    @property
    def nbytes(self) -> int:
        """The size of the values and lengths in memory, in bytes."""
        if self.value is None:
            return 0
        if isinstance(self.value, Tensor):
            return self.value.nbytes + (self.lengths.nbytes if self.lengths is not None else 0)
        return sum(
            len(v.encode("utf-8", "surrogatepass")) if isinstance(v, str) else v.nbytes for v in self.value
        )

    def padded(self, axis: Axis) -> Any:
        """Return the values as a stage sees them.

        Token and prompt columns become a padded tensor [rows, longest row], row and group columns a tensor
        [rows], and scalars a 0-d tensor or a tuple of them. Text becomes a list with one string per row, or
        one list of messages if that's what the stage returned. None stays None.
        """
        if self.value is None:
            return None
        match self.kind.level:
            case Level.TOKEN | Level.PROMPT:
                return pad(self.value, self.lengths)  # type: ignore[arg-type]
            case Level.GROUP:
                return self.value[axis.slots]
            case Level.TEXT:
                return [unpacked(text) for text in self.value]
        return writable_copy(self.value) if isinstance(self.value, Tensor) else self.value

    def take(self, index: Tensor, axis: Axis) -> Data:
        """Keep only the rows at ``index``. ``axis`` is the column's current axis."""
        if self.value is None:
            return self
        match self.kind.level:
            case Level.TOKEN | Level.PROMPT:
                return replace(
                    self, value=pick(self.value, self.row_lengths, index), lengths=self.row_lengths[index]
                )
            case Level.TEXT:
                return replace(self, value=tuple(self.value[i] for i in index.tolist()))
            case Level.ROW:
                return replace(self, value=self.value[index])
            case Level.GROUP:
                return replace(self, value=self.value[axis.slots[index][starts(axis.keys[index])]])
        return self

    @staticmethod
    def trimmed(kind: Kind, value: Any, axis: Axis, lengths: Tensor | None) -> Data:
        """Turn a value returned by a stage into a column; the inverse of ``padded``.

        ``lengths``: the row lengths of the token columns that the stage read.
        """
        match kind.level:
            case Level.TEXT:
                return Data(kind, tuple(value))
            case Level.TOKEN | Level.PROMPT:
                assert lengths is not None
                return Data(kind, flatten(value, lengths), lengths)
            case Level.GROUP:
                return Data(kind, value[axis.heads].contiguous())
        return Data(kind, value)


def empty(kind: Kind) -> Data:
    """Return a column of this kind with no rows."""
    if kind.level is Level.TEXT:
        return Data(kind, ())
    value = torch.zeros(0, dtype=getattr(torch, kind.dtype or "float32"))
    return Data(
        kind, value, torch.zeros(0, dtype=torch.int64) if kind.level in (Level.TOKEN, Level.PROMPT) else None
    )


def group_column(axis: Axis) -> Data:
    """Make the column ``group`` for an axis."""
    return Data(TABLE["group"].kind, axis.group_numbers)


def pad(flat: Tensor, lengths: Tensor) -> Tensor:
    """Lay out flat entries as a padded tensor [rows, longest row].

    Floats are padded with the current padding value (see ``padding``), other dtypes with 0. Writing to the
    result doesn't change ``flat``.
    """
    width, even = extent(lengths)
    if even:
        return writable_copy(flat).reshape(len(lengths), width)
    fill = _fill.get() if flat.is_floating_point() else 0
    out = torch.full((len(lengths), width), fill, dtype=flat.dtype, device=flat.device)
    out[torch.arange(width) < lengths[:, None]] = flat
    return out


def flatten(padded: Tensor, lengths: Tensor) -> Tensor:
    """Join the first ``lengths[i]`` entries of each row i into one flat tensor.

    Writing to ``padded`` later doesn't change the result.
    """
    width, even = extent(lengths)
    if even and width == padded.shape[1]:
        return writable_copy(padded.contiguous()).flatten(0, 1)
    return padded[torch.arange(padded.shape[1]) < lengths[:, None]]


@functools.lru_cache(maxsize=64)
def extent(lengths: Tensor) -> tuple[int, bool]:
    """Return the longest row length, and whether all rows have that length.

    Every column of a call asks for the same lengths, so results are cached per tensor object. This is safe
    because stored tensors are never written to.
    """
    width = int(lengths.max()) if len(lengths) else 0
    return width, bool((lengths == width).all())


# from this mean row length on, copying row by row is faster than indexing entries
LONG = 256


def pick(flat: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    """Copy out the entries of the rows at ``index``, one row after another."""
    if len(index) and len(flat) >= LONG * len(lengths):
        rows = torch.split(flat, lengths.tolist())
        return torch.cat([rows[i] for i in index.tolist()])
    starts, counts = (lengths.cumsum(0) - lengths)[index], lengths[index]
    return flat[starts.repeat_interleave(counts) + ramp(counts)]


def ramp(lengths: Tensor) -> Tensor:
    """Return each flat entry's position in its row: 0 … lengths[i]-1 for row i, one row after another."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


class Batch:
    """Named columns that share one row axis.

    Batches are immutable. ``a | b`` returns a with the columns of b added; where both have a column, b's
    wins.
    """

    def __init__(self, axis: Axis, data: Mapping[str, Data]) -> None:
        self.axis = axis
        self.data = dict(data)

    @staticmethod
    def of(
        columns: Mapping[str, Any] | None = None, /, *, kinds: Mapping[str, Kind] | None = None, **more: Any
    ) -> Batch:
        """Make a batch from lists.

        Lists of lists become token columns, lists of str become text columns, lists of numbers become row
        columns, and a single number becomes a scalar. Standard columns get their standard kind; for others,
        pass the kind in ``kinds`` or let it be guessed from the values. ``group`` takes one value per row,
        and rows with the same value belong to one prompt. Raises FlowError if columns have different numbers
        of rows.
        """
        values = {**(columns or {}), **more}
        rows = {name: len(value) for name, value in values.items() if not _single(value)}
        if len(set(rows.values())) > 1:
            raise FlowError(
                Problem(
                    "row-count",
                    "columns of one batch differ in their number of rows",
                    call_place(),
                    found=str(rows),
                    expected="one row count",
                    remedy="give each column one value per row",
                )
            )
        axis = _axis_of(next(iter(rows.values()), 0), values.get("group"))
        return Batch(
            axis,
            {name: _column(name, value, (kinds or {}).get(name), axis) for name, value in values.items()},
        )

    @property
    def columns(self) -> dict[str, Kind]:
        """Each column's kind, by name."""
        return {name: data.kind for name, data in self.data.items()}

    def __len__(self) -> int:
        return len(self.axis)

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def __getitem__(self, name: str) -> Any:
        """Return a column as a padded tensor, or as a list if it's text.

        Inside a flow, ``name`` can also be a scalar that every batch of the flow has, such as ``iteration``.
        Raises FlowError if there is no such column.
        """
        data = self.data.get(name)
        if data is not None and data.kind.level is not Level.SCALAR:
            return data.padded(self.axis)
        scalar = number(name)  # a state may have been set after this batch was made
        return self._data(name).padded(self.axis) if scalar is None else scalar

    def _data(self, name: str) -> Data:
        if name not in self.data:
            raise FlowError(missing_column(str(name), self.data))
        return self.data[name]

    def select(self, *names: str) -> Batch:
        """Return a batch with only these columns. Raises FlowError if one doesn't exist."""
        return Batch(self.axis, {name: self._data(name) for name in names})

    def drop(self, *names: str) -> Batch:
        """Return a batch without these columns. Raises FlowError if one doesn't exist."""
        dropped = {name: self._data(name) for name in names}
        return Batch(self.axis, {name: data for name, data in self.data.items() if name not in dropped})

    def rename(self, **names: str) -> Batch:
        """Rename columns: ``rename(old="new")``. An existing column called "new" is replaced."""
        renamed = {new: self._data(old) for old, new in names.items()}
        return Batch(
            self.axis, {name: data for name, data in self.data.items() if name not in names} | renamed
        )

    def __or__(self, other: Batch) -> Batch:
        if not isinstance(other, Batch):
            return NotImplemented
        return Batch(
            self.axis,
            self.data
            | {name: spread(name, data, other.axis, self.axis) for name, data in other.data.items()},
        )

    def rows(self, index: Sequence[int] | Tensor) -> Batch:
        """Return the rows at ``index``, in that order. ``index`` holds row numbers, or one bool per row."""
        where = torch.as_tensor(index)
        where = where.nonzero()[:, 0] if where.dtype is torch.bool else where.long()
        return Batch(
            self.axis.take(where), {name: data.take(where, self.axis) for name, data in self.data.items()}
        )

    def repeat(self, times: int) -> Batch:
        """Return a batch with ``times`` copies of each row, next to each other.

        In the column ``group``, the copies of a row form a group.
        """
        axis = self.axis.repeat(times)
        return Batch(axis, self.carried(axis) | {"group": group_column(axis)})

    def carried(self, axis: Axis) -> dict[str, Data]:
        """Return this batch's columns for the rows of ``axis``, which must be a direct child of its axis.

        Raises ValueError if ``axis`` has no parent.
        """
        if axis.index is None:
            raise ValueError("found an axis without a parent, expected an axis made from the batch's axis")
        return {name: data.take(axis.index, self.axis) for name, data in self.data.items()}

    def chunk(self, count: int) -> list[Batch]:
        """Split the rows into at most ``count`` consecutive batches whose sizes differ by at most one row.

        An empty batch gives a list with one empty batch.
        """
        return [
            self.rows(part) for part in torch.tensor_split(torch.arange(len(self)), count) if len(part)
        ] or [self]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Join batches into one, with the rows of one batch after another.

        Raises FlowError if their columns differ, or if there are no batches.
        """
        if not batches:
            raise FlowError(
                Problem(
                    "concat-columns",
                    "there are no batches to join",
                    call_place(),
                    found="none",
                    expected="at least one",
                    remedy="pass a list with a batch in it",
                )
            )
        first = batches[0]
        for other in batches:
            if _families(other) != _families(first):
                raise FlowError(
                    Problem(
                        "concat-columns",
                        "the batches to join have different columns",
                        call_place(),
                        found=listed(_families(other)),
                        expected=listed(_families(first)),
                        remedy="merge the missing columns into each batch before joining them",
                    )
                )
        axis = Axis(stacked([batch.axis.keys for batch in batches]), grouped=first.axis.grouped)
        return Batch(
            axis,
            {name: _joined([batch.data[name] for batch in batches], batches, axis) for name in first.data},
        )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name}: {data.kind}" for name, data in self.data.items())
        return f"Batch({len(self)} rows; {kinds})"


def _families(batch: Batch) -> list[str]:
    """Describe each column by its name, level and dtype family, sorted by name."""
    return sorted(
        f"{name}: {data.kind.level} {data.kind.family or ''}".rstrip() for name, data in batch.data.items()
    )


def _joined(pieces: Sequence[Data], batches: Sequence[Batch], axis: Axis) -> Data:
    first = pieces[0]
    if none := next((piece for piece in pieces if piece.value is None), None):
        return none
    if first.kind.level is Level.SCALAR:
        return pieces[-1]
    if first.kind.level is Level.TEXT:
        return replace(first, value=tuple(itertools.chain.from_iterable(piece.value for piece in pieces)))
    if first.kind.level is Level.GROUP:  # a group may begin in one batch and end in the next
        per_row = torch.cat([piece.padded(batch.axis) for piece, batch in zip(pieces, batches, strict=True)])
        return replace(first, value=per_row[axis.heads])
    lengths = torch.cat([piece.lengths for piece in pieces]) if first.ragged else None  # type: ignore[misc]
    return replace(first, value=torch.cat([piece.value for piece in pieces]), lengths=lengths)


def spread(
    name: str,
    data: Data,
    own: Axis,
    axis: Axis,
    fetch: Callable[[Data, Axis], Data] = lambda data, axis: data,
) -> Data:
    """Convert a column of the axis ``own`` into a column of ``axis``, which must be related.

    Axes are related if one was made from the other, or if they have a common ancestor. ``fetch(data, axis)``
    brings a column's values into this process, and is called only if they are needed. Raises FlowError if the
    axes are unrelated, if a row would get several values, or if a row would get none and the column can't
    hold NaN.
    """
    level = data.kind.level
    if own is axis or level is Level.SCALAR or data.value is None:
        return data
    if axis.took_from(own):
        return data.take(axis.back_to(own), own)
    if (cut := own.cut_of(axis)) is not None and cut.parent is not None:
        return spread(
            name,
            _per_token(name, fetch(spread(name, data, own, cut, fetch), cut), cut),
            cut.parent,
            axis,
            fetch,
        )
    grouped = level is Level.GROUP
    index = None if level is Level.TOKEN else own.groups_of(axis) if grouped else own.rows_of(axis)
    if index is None:
        raise FlowError(other_axis([name]))
    lacking = index < 0
    if not grouped and not bool(lacking.any()):
        return data.take(index, own)
    return _filled(name, fetch(data, own), index, lacking)


def _per_token(name: str, data: Data, axis: Axis) -> Data:
    """Turn one value per follow-up prompt into a token column of the responses that the prompts continue.

    Each value goes to the token right after its prompt; all other tokens get NaN. Raises FlowError unless the
    column has one float per row.
    """
    if data.kind.level is not Level.ROW or not data.value.is_floating_point():
        raise FlowError(partly(name, data.kind))
    assert axis.cut is not None
    assert axis.index is not None
    lengths = axis.cut.lengths
    value = torch.full((int(lengths.sum()),), torch.nan, dtype=data.value.dtype)
    value[(lengths.cumsum(0) - lengths)[axis.index] + axis.cut.place] = data.value
    return Data(Kind(Level.TOKEN, data.kind.dtype), value, lengths)


def _filled(name: str, data: Data, index: Tensor, lacking: Tensor) -> Data:
    """Pick the values at ``index``, with NaN wherever ``lacking`` is True.

    Raises FlowError if a value is lacking and the column can't hold NaN.
    """
    kind = Kind(Level.ROW, data.kind.dtype) if data.kind.level is Level.GROUP else data.kind
    if not bool(lacking.any()):
        return Data(kind, data.value[index])
    if kind.level is not Level.ROW or not data.value.is_floating_point():
        raise FlowError(partly(name, kind))
    value = torch.full((len(index),), torch.nan, dtype=data.value.dtype)
    value[~lacking] = data.value[index[~lacking]]
    return Data(kind, value)


def _single(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _axis_of(rows: int, group: Sequence[int] | Tensor | None) -> Axis:
    """Make the axis for ``rows`` new rows.

    Rows of one group share a position in the data stream; without ``group``, each row has its own. Raises
    FlowError if the rows of a group aren't adjacent.
    """
    if group is None:
        return Axis.fresh(rows)
    ids = torch.as_tensor(group).long()
    axis = Axis(torch.stack([ids, torch.zeros_like(ids)], 1), grouped=True)
    if axis.groups != len(torch.unique(ids)):
        raise FlowError(
            Problem(
                "group-apart",
                "rows of one group are not adjacent",
                call_place(),
                found=f"group {ids.tolist()}",
                expected="the rows of each group next to each other",
                remedy="sort the rows by group",
            )
        )
    return Axis(torch.stack([ids, torch.arange(len(ids)) - axis.heads[axis.slots]], 1), grouped=True)


def _column(name: str, value: Any, kind: Kind | None, axis: Axis) -> Data:
    if _single(value):
        return Data(*_typed(kind or Kind(Level.SCALAR), torch.as_tensor(value)))
    if len(value) and isinstance(value[0], str):
        return Data(kind or Kind(Level.TEXT), tuple(value))
    kind = (
        kind
        or standard_kind(name)
        or Kind(Level.TOKEN if len(value) and isinstance(value[0], Sequence | Tensor) else Level.ROW)
    )
    if kind.level in (Level.TOKEN, Level.PROMPT):
        pieces = [torch.as_tensor(row) for row in value]
        flat = torch.cat(pieces) if pieces else torch.zeros(0)
        return Data(*_typed(kind, flat), torch.tensor([len(piece) for piece in pieces], dtype=torch.int64))
    if kind.level is Level.TEXT:
        return Data(kind, tuple(value))
    kind, tensor = _typed(kind, torch.as_tensor(value))
    return Data(kind, tensor[axis.heads] if kind.level is Level.GROUP else tensor)


def _typed(kind: Kind, value: Tensor) -> tuple[Kind, Tensor]:
    dtype = DTYPES.get(kind.family or "")
    if dtype is not None and not (value.is_floating_point() and kind.family == "float"):
        value = value.to(dtype)
    return Kind(kind.level, str(value.dtype).removeprefix("torch.")), value


def missing_column(name: str, columns: Mapping[str, object]) -> Problem:
    """Return the Problem of reading a column that the batch doesn't have; it only has ``columns``."""
    close = column_meant(name, columns)
    remedy = (
        f"read '{close}'"
        if close
        else f"merge the stage that gives it first: batch |= <stage giving '{name}'>(batch)"
    )
    return Problem(
        "missing-column",
        f"the batch has no column '{name}'",
        call_place(),
        found=listed(columns),
        expected=name,
        nearest=close,
        remedy=remedy,
    )


def other_axis(columns: Iterable[str]) -> Problem:
    """Return the Problem of merging columns from a batch with unrelated rows."""
    return Problem(
        "row-axes",
        "the two batches have different rows, so their columns cannot be merged",
        call_place(),
        found=listed(columns),
        expected="columns of the same rows, or one row-level value per prompt of the same prompts",
        remedy="merge only columns that a stage returned for these rows; for a baseline per prompt, merge "
        "only its scores: batch |= reward(greedy, gives='baseline')",
    )


def partly(name: str, kind: Kind | None) -> Problem:
    """Return the Problem of a merge that leaves rows without a value in a column that can't hold NaN.

    ``kind``: the column's kind.
    """
    return Problem(
        "rows-lacking",
        f"column '{name}' has no value for some of the rows that it is merged into",
        call_place(),
        found=f"{name}: {kind}, for some of the rows only",
        expected="a float column, so that missing values can be NaN",
        remedy=f"give '{name}' as row(torch.float32)",
    )
