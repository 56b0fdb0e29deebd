"""The header of a frame, which describes a batch, and the checks shared by the writer and the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Data
from rlflow.author.columns import Kind, Level
from rlflow.errors import printable

LIMIT = 1 << 36  # maximum size of a frame in bytes
HEADER_LIMIT = 1 << 24  # maximum size of a header in bytes
DIMENSIONS = 8
KEYS = 2  # numbers in a row's key, if the header does not give their count
LONGEST_PATH = 256
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    )
}
FORMS = {
    "text": {Level.TEXT},
    "ragged": {Level.TOKEN, Level.PROMPT},
    "tensor": {Level.ROW, Level.GROUP, Level.SCALAR},
    "tuple": {Level.SCALAR},
}


class WireError(ValueError):
    """Bytes aren't a batch of this version, or a batch can't be written as bytes."""

    @classmethod
    def of(cls, what: str, actual: object, expected: object) -> WireError:
        """Return an error that says where (``what``), what was found, and what was expected."""
        return cls(": ".join((_brief(what), f"found {_brief(actual)}, expected {expected}")))


def _brief(value: object) -> str:
    """Return a value as a short string without control characters.

    The bytes it was read from may come from an unknown source.
    """
    return printable(str(value)[:160], keep="")


class BufferShape(NamedTuple):
    """The dtype and shape of one tensor in the payload of a frame."""

    dtype: str  # as torch prints it, without ``torch.``
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class HeaderColumn(NamedTuple):
    """The description of one column in a frame's header."""

    name: str
    kind: Kind
    form: str  # text (bytes and offsets), ragged (entries and lengths), tensor, or tuple (of scalars)
    buffers: tuple[BufferShape, ...]


def packed(axis: Axis, columns: Sequence[HeaderColumn]) -> bytes:
    """Return a batch's header as msgpack. Raises WireError if it's too large."""
    entries = [[name, kind.level.value, kind.dtype, form, buffers] for name, kind, form, buffers in columns]
    width = axis.keys.shape[1]
    header: bytes = msgpack.packb(
        [bool(axis.grouped), len(axis), entries, *([width] if width != KEYS else [])],
        unicode_errors="surrogatepass",
    )
    if len(header) > HEADER_LIMIT:
        raise WireError.of(
            "header", f"{len(header)} bytes for {len(columns)} columns", f"at most {HEADER_LIMIT}"
        )
    return header


def unpacked(raw: memoryview) -> tuple[bool, tuple[int, int], list[HeaderColumn]]:
    """Parse a header. Return whether rows are grouped, the shape of their keys, and the columns.

    Raises WireError if the bytes aren't a valid header.
    """
    try:
        decoded = msgpack.unpackb(raw, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError.of("header", f"{type(error).__name__}: {error}", "msgpack") from error
    longer = type(decoded) is list and len(decoded) == 4
    grouped, rows, entries, width = _fields(
        "header", decoded if longer else _with_width(decoded), (bool, int, list, int)
    )
    columns = [_column(entry) for entry in entries]
    if len({column.name for column in columns}) != len(columns):
        raise WireError.of(
            "header", f"columns {[column.name for column in columns][:16]}", "one column of each name"
        )
    if rows < 0:
        raise WireError.of("header", f"{rows} rows", "0 or more")
    if width < KEYS or width > LONGEST_PATH or (longer and width == KEYS):
        raise WireError.of(
            "header", f"keys of {width} numbers", f"{KEYS}, or up to {LONGEST_PATH} given in the header"
        )
    return grouped, (rows, width), columns


def _with_width(decoded: Any) -> Any:
    """Return a decoded header with the number of integers per row key, by default 2."""
    return [*decoded, KEYS] if type(decoded) is list and len(decoded) == 3 else decoded


def _fields(what: str, value: Any, types: Sequence[Any]) -> list[Any]:
    """Return ``value`` as a list, after checking that it has exactly one item of each type in ``types``.

    True and False don't count as int. ``what``: the part of the header, for messages. Raises WireError if an
    item doesn't fit.
    """
    if (
        type(value) is not list
        or len(value) != len(types)
        or not all(type(v) in _either(t) for v, t in zip(value, types, strict=True))
    ):
        types_found = (
            [type(item).__name__ for item in value[:16]] if type(value) is list else type(value).__name__
        )
        raise WireError.of(
            what, types_found, [" or ".join(t.__name__ for t in _either(kind)) for kind in types]
        )
    return value


def _either(kind: Any) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _column(value: Any) -> HeaderColumn:
    name, level, dtype, form, buffers = _fields("column", value, (str, str, (str, type(None)), str, list))
    if level not in list(Level):
        raise WireError.of(f"column {name!r}", f"level {level!r}", ", ".join(Level))
    column = HeaderColumn(
        name, Kind(Level(level), dtype), form, tuple(_shape_of(name, buffer) for buffer in buffers)
    )
    check_kind(column)
    return column


def _shape_of(name: str, value: Any) -> BufferShape:
    dtype, shape = _fields(f"buffer of column {name!r}", value, (str, list))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise WireError.of(f"buffer of column {name!r}", f"shape {shape[:16]}", "sizes of at least 0")
    return BufferShape(dtype, tuple(shape))


def check_kind(column: HeaderColumn) -> None:
    """Raise WireError if a column's dtypes, shapes or number of buffers don't fit its kind and form."""
    name, kind, form, buffers = column
    dtypes = [buffer.dtype for buffer in buffers]
    if not {kind.dtype or "bool", *dtypes} <= set(DTYPES):
        raise WireError.of(
            f"column {name!r}", f"dtypes {kind.dtype}, {dtypes[:8]}", f"dtypes among {', '.join(DTYPES)}"
        )
    if kind.level not in FORMS.get(form, ()):
        raise WireError.of(
            f"column {name!r}",
            f"form {form!r} of a {kind.level} column",
            f"one of {', '.join(FORMS)} that fits",
        )
    # this also holds for empty buffers, because torch multiplies the other sizes to get the strides
    large = [
        b.shape
        for b in buffers
        if len(b.shape) > DIMENSIONS or math.prod(size or 1 for size in b.shape) > LIMIT
    ]
    if large:
        raise WireError.of(
            f"column {name!r}",
            f"shape {large[0][:16]}",
            f"at most {DIMENSIONS} dimensions and {LIMIT} entries",
        )
    if not _fits(column, dtypes):
        raise WireError.of(
            f"column {name!r}", f"buffers of {dtypes[:8]}", f"the buffers of a {kind} column, form {form}"
        )


def _fits(column: HeaderColumn, dtypes: Sequence[str]) -> bool:
    kind, form = column.kind, column.form
    if form == "text":
        return (
            kind.dtype is None
            and dtypes == ["uint8", "int64"]
            and all(len(buffer.shape) == 1 for buffer in column.buffers)
        )
    values = dtypes[:1] if form == "ragged" else dtypes
    if not all(kind.family in (None, Kind(kind.level, dtype).family) for dtype in values):
        return False
    return dtypes[1:] == ["int64"] if form == "ragged" else form == "tuple" or len(dtypes) == 1


def check_rows(name: str, data: Data, axis: Axis) -> None:
    """Raise WireError if a column's rows don't match those of the batch."""
    subject, level = f"column {name!r}", data.kind.level
    if level is Level.SCALAR:
        _check_scalars(subject, data.value if isinstance(data.value, tuple) else (data.value,))
    elif data.lengths is not None:
        _check_lengths(subject, data.value, data.lengths, len(axis))
    else:
        _check_count(subject, data.value, level, axis)


def _check_scalars(what: str, values: Sequence[Tensor]) -> None:
    shapes = [list(value.shape) for value in values]
    if any(shapes):
        raise WireError.of(what, f"shapes {shapes[:8]}", "scalars")


def _check_count(what: str, value: Any, level: Level, axis: Axis) -> None:
    rows = axis.groups if level is Level.GROUP else len(axis)
    entries = len(value) if level is Level.TEXT or value.ndim else "no"
    if entries != rows:
        raise WireError.of(what, f"{entries} entries", f"{rows}, one for each {level.value}")


def _check_lengths(what: str, value: Tensor, lengths: Tensor, rows: int) -> None:
    if lengths.shape != (rows,) or not value.ndim:
        raise WireError.of(
            what,
            f"lengths {list(lengths.shape)} of {list(value.shape)} entries",
            f"{rows} lengths, and a tensor of entries",
        )
    values = lengths.numpy()
    ends = values.cumsum()  # a sum that overflows becomes negative
    valid = not rows or (values.min() >= 0 and ends.min() >= 0)
    if not valid or (ends[-1] if rows else 0) != len(value):
        raise WireError.of(
            what, f"lengths {lengths[:4].tolist()} …", f"{rows} lengths that sum to {len(value)}"
        )
