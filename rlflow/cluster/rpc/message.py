"""Call and Answer: the messages between the driver and a worker.

Both are small and contain no tensors of columns. They consist of plain values in msgpack, because every rank
and call needs its own message, and pickling dataclasses and arrays takes ten times as long. Values that can
be any object, such as an author's settings, are pickled once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import msgpack
import numpy as np
from numpy.typing import NDArray

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.figures import Figure, Of
from rlflow.cluster.rpc.row_messages import RowMessage
from rlflow.cluster.rpc.shared_memory import SharedFrame
from rlflow.execution.tally import Label, PartialMetric, PartialMetrics
from rlflow.execution.wire.column_wire import pack, unpack

Index = NDArray[np.int64]
KEPT = 1 << 62  # an iteration that never ends: what is stored for it is kept until it is forgotten


class ShardRows(NamedTuple):
    """A reference to all or some rows of a shard."""

    # key of a shard on the worker, or None if the rows are the call's next transfer
    key: int | None
    rows: Index | None = None  # row indices, or None for all rows in their order


class Source(NamedTuple):
    """The shards that a worker takes some columns of a call's batch from."""

    columns: Sequence[tuple[str, str]]  # (name in the batch, name in the shard)
    parts: Sequence[ShardRows]  # their rows are joined one after another
    order: Index | None = None  # order of the joined rows, or None to keep it
    kinds: Sequence[Kind] = ()  # kinds of the columns, needed if there are no parts
    # key under which the worker also stores these rows for later calls, with the column names in the shards
    keep: int | None = None


class Inputs(NamedTuple):
    """A call's batch, as references to the worker's own shards and to transferred rows."""

    keys: Index | None  # int64 [rows, 2 or more], or None to use those of the first part's shard
    grouped: bool
    sources: Sequence[Source]  # sources of its columns
    scalars: Mapping[str, Data] = {}


InlineMessage = RowMessage | None  # None: the next of the transfers that Ray sends separately

NOTHING = Inputs(np.zeros((0, 2), np.int64), False, ())


class Call(NamedTuple):
    """A call to one operation on a worker."""

    op: str
    key: int  # key under which its result is stored
    inputs: Inputs
    iteration: int = 0
    arguments: Mapping[str, Any] = {}
    forget: Sequence[int] = ()  # keys of shards that are no longer needed
    # rows from other workers, in the order in which the inputs name them
    row_messages: Sequence[InlineMessage] = ()

    def __str__(self) -> str:
        """Describe the call as an activity of the worker."""
        of = self.arguments.get("function") or self.arguments.get("role")
        when = f" in iteration {self.iteration}" if self.iteration < KEPT else ""
        return f"{self.op}{f' of {of}' if of else ''}{when}"

    def packed(self, arguments: bytes) -> bytes:
        """Pack the call into bytes.

        ``arguments``: what ``pickled`` returned, the same for all ranks.
        """
        keys, grouped, sources, scalars = self.inputs
        width = 0 if keys is None else keys.shape[1]
        inputs = (_raw(keys), width, grouped, [_source(source) for source in sources], _whole(scalars))
        row_messages = [_inline(row_message) for row_message in self.row_messages]
        frame: bytes = msgpack.packb(
            (self.op, self.key, inputs, self.iteration, arguments, self.forget, row_messages)
        )
        return frame

    @staticmethod
    def unpacked(frame: bytes | memoryview) -> Call:
        """Return the call in a frame made by ``packed``."""
        op, key, (keys, width, grouped, sources, scalars), iteration, arguments, forget, row_messages = (
            msgpack.unpackb(frame, use_list=False)
        )
        rows = _index(keys)
        inputs = Inputs(
            None if rows is None else rows.reshape(-1, width),
            grouped,
            [_opened(*source) for source in sources],
            _scalars(scalars),
        )
        return Call(
            op,
            key,
            inputs,
            iteration,
            cloudpickle.loads(arguments),
            forget,
            [_row_message(row_message) for row_message in row_messages],
        )

    def rows(self, transfers: Sequence[RowMessage]) -> list[RowMessage]:
        """Return the messages with rows from other workers, in the order of the call's inputs.

        Small messages are part of the call; ``transfers`` has the others.
        """
        separate = iter(transfers)
        return (
            [next(separate) if row_message is None else row_message for row_message in self.row_messages]
            if self.row_messages
            else list(transfers)
        )


def pickled(arguments: Mapping[str, Any]) -> bytes:
    """Pickle a call's arguments, for ``Call.packed``."""
    raw: bytes = cloudpickle.dumps(dict(arguments))
    return raw


def _whole(scalars: Mapping[str, Data]) -> bytes | None:
    return pack(Batch(Axis.fresh(0), scalars)) if scalars else None


def _scalars(frame: bytes | None) -> Mapping[str, Data]:
    return unpack(frame).data if frame else {}


def _inline(row_message: InlineMessage) -> Any:
    """Turn a row message into plain values, for msgpack."""
    return row_message.tobytes() if isinstance(row_message, np.ndarray) else row_message


def _row_message(plain: Any) -> InlineMessage:
    """Turn plain values from ``_inline`` back into a row message."""
    return np.frombuffer(plain, np.uint8) if isinstance(plain, bytes) else plain and SharedFrame(*plain)


def _raw(index: Index | None) -> bytes | None:
    return None if index is None else index.tobytes()


def _index(raw: bytes | None) -> Index | None:
    return None if raw is None else np.frombuffer(raw, np.int64)


def _source(source: Source) -> tuple[Any, ...]:
    columns, parts, order, kinds, keep = source
    return (
        columns,
        [(key, _raw(rows)) for key, rows in parts],
        _raw(order),
        [(kind.level, kind.dtype) for kind in kinds],
        keep,
    )


def _opened(columns: Any, parts: Any, order: bytes | None, kinds: Any, keep: int | None) -> Source:
    rows = [ShardRows(key, _index(rows)) for key, rows in parts]
    return Source(columns, rows, _index(order), [kind_of(*kind) for kind in kinds], keep)


@functools.cache
def kind_of(level: str, dtype: str | None) -> Kind:
    """Return the column kind with this level and dtype, always as the same object."""
    return Kind(Level(level), dtype)


def _label(sent: str | list[str]) -> Label:
    return sent if isinstance(sent, str) else Figure(Of(sent[0]), *sent[1:])


class Answer(NamedTuple):
    """A worker's answer to a call."""

    key: int = 0  # key under which the worker stores the shard
    rows: int = 0  # rows of the shard
    columns: Mapping[str, tuple[Kind, int]] = {}  # name → (kind, bytes)
    lengths: Mapping[str, Index] = {}  # level of ragged columns → int64 [rows]
    scalars: Mapping[str, Data] = {}  # scalar columns, which are not stored
    tallies: PartialMetrics = {}  # metrics
    value: Any = None  # a result that is not a batch
    # start and end in seconds of the wall clock, which all machines share
    ran: tuple[float, float] = (0.0, 0.0)
    printed: bytes = b""  # lines that rewards have printed since the last answer
    received: int = 0  # bytes of rows that came from other workers

    def packed(self) -> bytes | Answer:
        """Pack the answer into bytes. If it has a value, which may be large, it's returned as it is."""
        if self.value is not None:
            return self
        columns = [(name, kind.level, kind.dtype, size) for name, (kind, size) in self.columns.items()]
        lengths = {level: values.tobytes() for level, values in self.lengths.items()}
        tallies = [
            (label, float(tally.total), int(tally.count), float(tally.highest), tally.kind)
            for label, tally in self.tallies.items()
        ]
        frame: bytes = msgpack.packb(
            (
                self.key,
                self.rows,
                columns,
                lengths,
                _whole(self.scalars),
                tallies,
                self.ran,
                self.printed,
                self.received,
            )
        )
        return frame

    @staticmethod
    def unpacked(frame: bytes | Answer) -> Answer:
        """Return the answer in a frame made by ``packed``."""
        if isinstance(frame, Answer):
            return frame
        key, rows, columns, lengths, scalars, tallies, ran, printed, received = msgpack.unpackb(frame)
        kinds = {name: (kind_of(level, dtype), size) for name, level, dtype, size in columns}
        return Answer(
            key,
            rows,
            kinds,
            {level: np.frombuffer(raw, np.int64) for level, raw in lengths.items()},
            _scalars(scalars),
            {_label(label): PartialMetric(*values) for label, *values in tallies},
            ran=tuple(ran),
            printed=printed,
            received=received,
        )
