"""Pack a batch into bytes and unpack it: the wire format of columns between processes.

    prefix    28 bytes: magic, version, length of the header, bytes of the payload, CRC-32 of the prefix and the header
    header    msgpack: whether rows are grouped, number of rows, each column's name, kind, form and buffers (dtype and shape), and
              the count of numbers in a key if it is not 2
    payload   the buffers, each starting at a multiple of 64 bytes: the keys of the rows, then the buffers of each column

rlflow doesn't use safetensors for this, because safetensors has no ragged columns, text or column kinds. It
also copies tensors when it reads them, so it can't return views of memory that Ray shares between processes.

Where each buffer lies is computed from the dtypes and shapes of those before it, so buffers can't overlap.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import LONG, Batch, Data, extent
from rlflow.author.columns import Kind, Level
from rlflow.author.messages import read, written
from rlflow.execution.wire.header import (
    DTYPES,
    HEADER_LIMIT,
    KEYS,
    LIMIT,
    LONGEST_PATH,
    BufferShape,
    HeaderColumn,
    WireError,
    check_kind,
    check_rows,
    packed,
    unpacked,
)

__all__ = ["BatchFrame", "WireError", "pack", "unpack"]

MAGIC = b"RLFBATCH"
VERSION = 2
ALIGNMENT = 64  # bytes: Ray's alignment of buffers, and a cache line
IDS = frozenset({"tokens", "prompt_tokens"})  # columns of token ids
_PREFIX = struct.Struct("<8sIIQ")
_CRC = struct.Struct("<I")
HEAD = _PREFIX.size + _CRC.size  # start of the header


# -- to bytes
# ------------------------------------------------------------------------------------------------------------


def pack(batch: Batch) -> bytes:
    """Pack the batch into a single frame of bytes.

    The origin of the rows (``Axis.parent``) isn't stored. Raises WireError for complex and quantised dtypes,
    and for a column whose rows don't match those of the batch.
    """
    return BatchFrame(batch).written().numpy().tobytes()


class StoredBuffer:
    """A buffer of a frame that hasn't been written yet.

    It consists either of several tensors with the same dtype, to be written one after another, or of the
    given ``rows`` of one tensor [rows, entries per row].
    """

    def __init__(
        self, parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype, rows: Tensor | None = None
    ) -> None:
        self.parts = parts
        self.rows = rows
        self.dtype = dtype
        self.buffer = BufferShape(str(dtype).removeprefix("torch."), shape)

    @staticmethod
    def whole(tensor: Tensor) -> StoredBuffer:
        """Return a buffer with all entries of one tensor."""
        return StoredBuffer((tensor,), tuple(tensor.shape), tensor.dtype)

    def write(self, memory: Tensor) -> None:
        """Write the buffer's entries into ``memory``, uint8 [bytes of the buffer]."""
        if not memory.numel():
            return
        out = memory.view(self.dtype).view(self.buffer.shape)
        if self.rows is not None:
            source, picked = (
                self.parts[0].detach().view(torch.uint8),
                out.view(len(self.rows), -1).view(torch.uint8),
            )
            torch.index_select(source, 0, self.rows, out=picked)
        elif len(self.parts) == 1:
            out.copy_(self.parts[0])
        else:
            torch.cat(list(self.parts), out=out)


class BatchFrame:
    """A frame that hasn't been written yet: a batch, or some of its rows.

    ``rows``: int64, the indices of the rows to write, in this order, or None for all rows. ``narrow``:
    whether to write int64 columns as int32 if all their numbers fit; their kind remains int64. Raises
    WireError in the same cases as ``pack`` and, with ``narrow``, for token ids that don't fit into int32.
    """

    def __init__(self, batch: Batch, rows: Tensor | None = None, *, narrow: bool = False) -> None:
        keys = batch.axis.keys
        if keys.dtype != torch.int64 or keys.ndim != 2 or not KEYS <= keys.shape[1] <= LONGEST_PATH:
            raise WireError.of(
                "keys", StoredBuffer.whole(keys).buffer, f"int64 {[len(batch), KEYS]}, or with more numbers"
            )
        axis = batch.axis if rows is None else batch.axis.take(rows)
        stored = [
            (name, data.kind, _form(data), _stored(name, data, batch.axis, rows, narrow))
            for name, data in batch.data.items()
        ]
        columns = [
            HeaderColumn(name, kind, form, tuple(item.buffer for item in items))
            for name, kind, form, items in stored
        ]
        for column, data in zip(columns, batch.data.values(), strict=True):
            check_kind(column)
            check_rows(column.name, data, batch.axis)
        self._header = packed(axis, columns)
        self._buffers = [
            StoredBuffer.whole(axis.keys),
            *itertools.chain.from_iterable(items for *_, items in stored),
        ]
        self._places = list(_places(HEAD + len(self._header), [item.buffer for item in self._buffers]))
        self.nbytes = self._places[-1][1]

    def _head(self) -> bytes:
        """Return the prefix and the header."""
        prefix = _PREFIX.pack(MAGIC, VERSION, len(self._header), self.nbytes - HEAD - len(self._header))
        return prefix + _CRC.pack(zlib.crc32(self._header, zlib.crc32(prefix))) + self._header

    def written(self) -> Tensor:
        """Write the frame into new memory, and return that memory, uint8 [nbytes]."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8)
        self.write(memory)
        return memory

    def write(self, memory: Tensor) -> None:
        """Write the frame into ``memory``, uint8 [nbytes]. Each entry is copied once.

        The memory must start at a multiple of ALIGNMENT bytes.
        """
        head, raw = self._head(), memory.numpy()
        raw[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        end = len(head)
        for (start, after), item in zip(self._places, self._buffers, strict=True):
            raw[end:start] = 0
            item.write(memory[start:after])
            end = after


def _places(end: int, buffers: Iterable[BufferShape]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) for each buffer, as byte positions in the frame.

    ``end``: where the data before the first buffer ends.
    """
    for buffer in buffers:
        start = end + -end % ALIGNMENT
        end = start + buffer.nbytes
        yield start, end


def _form(data: Data) -> str:
    if isinstance(data.value, tuple):
        return "text" if data.kind.level is Level.TEXT else "tuple"
    return "tensor" if data.lengths is None else "ragged"


def _stored(name: str, data: Data, axis: Axis, rows: Tensor | None, narrow: bool) -> tuple[StoredBuffer, ...]:
    """Return the buffers for some rows of a column. ``rows``: row indices, or None for all rows."""
    if rows is not None and (
        data.lengths is None or not len(data.value) or len(data.value) < LONG * len(data.lengths)
    ):
        data, rows = data.take(rows, axis), None
    if data.kind.level is Level.TEXT:
        return tuple(map(StoredBuffer.whole, _encoded(name, data.value)))
    values = data.value if isinstance(data.value, tuple) else (data.value,)
    if not all(isinstance(tensor, Tensor) for tensor in values):
        raise WireError.of(
            f"column {name!r}", f"a {data.kind.level} column of {type(values[0]).__name__}", "tensors"
        )
    if data.lengths is None:
        return tuple(
            StoredBuffer((value,), tuple(value.shape), _width(name, data.kind, value, narrow))
            for value in values
        )
    lengths, dtype = (
        data.lengths if rows is None else data.lengths[rows],
        _width(name, data.kind, data.value, narrow),
    )
    if rows is None:
        return StoredBuffer((data.value,), tuple(data.value.shape), dtype), StoredBuffer.whole(lengths)
    shape = (int(lengths.sum()), *data.value.shape[1:])
    if dtype is data.value.dtype and extent(data.lengths)[1]:
        return StoredBuffer(
            (data.value.reshape(len(data.lengths), -1),), shape, dtype, rows
        ), StoredBuffer.whole(lengths)
    return StoredBuffer(runs(data.value, data.lengths, rows), shape, dtype), StoredBuffer.whole(lengths)


def runs(flat: Tensor, lengths: Tensor, rows: Tensor) -> Sequence[Tensor]:
    """Return the entries of some rows as views of ``flat``, with one view for each stretch of adjacent rows.

    ``flat``: the entries of all rows, one row after another. ``lengths``: how many entries each row has,
    int64 [all rows]. ``rows``: the indices of the rows to return.
    """
    starts = (lengths.cumsum(0) - lengths)[rows].numpy()
    ends = starts + lengths[rows].numpy()
    if not len(rows):
        return []
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    starts, ends = starts[np.append(0, gaps + 1)], ends[np.append(gaps, len(rows) - 1)]
    before = np.append(0, ends[:-1])
    if (starts < before).any():  # the rows are not in ascending order
        return [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    # split all rows and the gaps between them in one call instead of one by one
    sizes = np.stack([starts - before, ends - starts], 1).ravel()
    return torch.split(flat, [*sizes.tolist(), len(flat) - int(ends[-1])])[1:-1:2]


def _width(name: str, kind: Kind, value: Tensor, narrow: bool) -> torch.dtype:
    """Return the dtype in which to write a column.

    With ``narrow``, that is int32 for an int64 column whose numbers all fit. Raises WireError for token ids
    that don't fit.
    """
    if not narrow or value.dtype is not torch.int64 or kind.dtype != "int64" or not value.numel():
        return value.dtype
    least, most = (int(end) for end in torch.aminmax(value))
    if least >= -(1 << 31) and most < 1 << 31:
        return torch.int32
    if name in IDS:
        raise WireError.of(
            f"column {name!r}",
            f"token id {most if most >= 1 << 31 else least}",
            f"ids of 32 bits, at most {(1 << 31) - 1}",
        )
    return torch.int64


def _encoded(name: str, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    if not all(isinstance(text, str) for text in texts):
        raise WireError.of(f"column {name!r}", "a text that is not a str", "str")
    encoded = [written(text).encode("utf-8", "surrogatepass") for text in texts]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, encoded))], dtype=torch.int64)
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)), offsets


# -- from bytes
# ------------------------------------------------------------------------------------------------------------


def unpack(data: bytes | bytearray | memoryview, *, limit: int = LIMIT) -> Batch:
    """Unpack a frame made by ``pack``, and return the batch. ``axis.parent`` of its rows is None.

    The tensors are views of ``data`` and keep it alive. Don't write to them, and don't change ``data`` while
    they are in use. A buffer is copied if its memory isn't aligned to its item size.

    ``limit``: the maximum size of a frame in bytes. Raises WireError if ``data`` isn't a valid frame. Sizes
    are checked before memory is allocated. A checksum covers the prefix and the header but not the payload,
    so a corrupted payload changes values without an error.
    """
    frame = _bytes_of(data)
    header, start = _opened(frame, limit)
    grouped, shape, columns = unpacked(header)
    raw = _Lent(frame, np.frombuffer(frame, dtype=np.uint8).ctypes.data, len(frame)).array()
    buffers = _laid_out(
        raw,
        start,
        [BufferShape("int64", shape), *(buffer for column in columns for buffer in column.buffers)],
    )
    axis = Axis(next(buffers), grouped=grouped)
    batch = Batch(
        axis, {column.name: _read(column, [next(buffers) for _ in column.buffers]) for column in columns}
    )
    for name, column_data in batch.data.items():
        check_rows(name, column_data, axis)
    return batch


def _bytes_of(data: bytes | bytearray | memoryview) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise WireError.of("frame", f"{type(data).__name__} ({error})", "contiguous bytes") from error


def _opened(frame: memoryview, limit: int) -> tuple[memoryview, int]:
    """Check the prefix of a frame. Return its header, and the position of its payload."""
    if not HEAD <= len(frame) <= limit:
        raise WireError.of("frame", f"{len(frame)} bytes", f"{HEAD} to {limit}")
    magic, version, length, size = _PREFIX.unpack_from(frame)
    if (magic, version) != (MAGIC, VERSION):
        raise WireError.of("frame", f"{magic!r} version {version}", f"{MAGIC!r} version {VERSION}")
    end = HEAD + length
    if length > HEADER_LIMIT or end + size != len(frame):
        raise WireError.of(
            "frame", f"{len(frame)} bytes", f"{HEAD} + {length} of header (at most {HEADER_LIMIT}) + {size}"
        )
    checksum, expected = (
        zlib.crc32(frame[HEAD:end], zlib.crc32(frame[: _PREFIX.size])),
        _CRC.unpack_from(frame, _PREFIX.size)[0],
    )
    if checksum != expected:
        raise WireError.of("checksum of the prefix and header", f"{checksum:08x}", f"{expected:08x}")
    return frame[HEAD:end], end


def _laid_out(
    raw: np.ndarray[Any, np.dtype[np.uint8]], start: int, buffers: Sequence[BufferShape]
) -> Iterator[Tensor]:
    """Return each buffer of a payload as a tensor that shares the payload's memory.

    ``raw``: the frame. ``start``: where the payload begins. Raises WireError if the buffers don't fill the
    frame exactly.
    """
    places = list(_places(start, buffers))
    start = places[-1][1]
    if start != len(raw):
        raise WireError.of(
            "payload", f"a frame of {len(raw)} bytes", f"{start}, from the columns' dtypes and shapes"
        )
    return (_tensor(raw[first:end], buffer) for (first, end), buffer in zip(places, buffers, strict=True))


def _tensor(raw: np.ndarray[Any, np.dtype[np.uint8]], buffer: BufferShape) -> Tensor:
    dtype = DTYPES[buffer.dtype]
    if dtype is torch.bool and raw.size and int(raw.max()) > 1:
        raise WireError.of("bool buffer", f"a byte of {int(raw.max())}", "0 or 1")
    if not raw.size:
        return torch.empty(buffer.shape, dtype=dtype)
    flat = torch.from_numpy(raw)
    return (flat if raw.ctypes.data % dtype.itemsize == 0 else flat.clone()).view(dtype).reshape(buffer.shape)


def _read(column: HeaderColumn, tensors: Sequence[Tensor]) -> Data:
    if column.form == "text":
        return Data(column.kind, tuple(_decoded(column.name, *tensors)))
    if column.form == "tuple":
        return Data(column.kind, tuple(tensors))
    return Data(column.kind, *tensors)


def _decoded(name: str, blob: Tensor, offsets: Tensor) -> Iterator[str]:
    ends = offsets.tolist()
    if ends[:1] != [0] or ends[-1] != len(blob) or any(a > b for a, b in itertools.pairwise(ends)):
        raise WireError.of(
            f"text column {name!r}", f"offsets {ends[:4]} … {ends[-1:]}", f"ascending from 0 to {len(blob)}"
        )
    raw = blob.numpy().data
    try:
        yield from (read(str(raw[a:b], "utf-8", "surrogatepass")) for a, b in itertools.pairwise(ends))
    except UnicodeDecodeError as error:
        raise WireError.of(f"text column {name!r}", error.reason, "UTF-8") from error
    except ValueError as error:
        raise WireError.of(f"text column {name!r}", error, "messages after their marker, or text") from error


def viewed(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Return bytes as a tensor that shares their memory. Don't write to it."""
    return torch.from_numpy(_Lent(raw, raw.ctypes.data, raw.nbytes).array())


class _Lent:
    """Makes read-only memory look writable to numpy.

    Torch has no read-only tensors, and would warn about read-only arrays.
    """

    def __init__(self, owner: object, start: int, size: int) -> None:
        self.owner = owner  # keeps the memory alive, and prevents resizing it
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (start, False)}

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.asarray(self)
