"""What the driver asks of a worker, and what it answers: plain data, no tensors of columns, as few bytes.

Both are msgpack of plain values, made once per rank and call: a pickle of dataclasses and arrays takes ten times as long. What may be any
object (an author's settings) goes along as a pickle, made once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray
from ray import cloudpickle

from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.wire import pack, unpack
from rlflow.columns import Kind, Level
from rlflow.execution.tally import PartialMetric

Index = NDArray[np.int64]


class ShardRows(NamedTuple):
    """Rows of a shard: the worker's own under ``key``, or the next of the transfers that come with the call (None). ``rows``: which,
    None for all in their order. A transfer has just the rows that are wanted."""

    key: int | None
    rows: Index | None = None


class Source(NamedTuple):
    """Columns that lie alike. columns: (name wanted, name in the shard). parts one after another, then put into ``order``. kinds: of
    the columns, where there are no parts to say them."""

    columns: Sequence[tuple[str, str]]
    parts: Sequence[ShardRows]
    order: Index | None = None
    kinds: Sequence[Kind] = ()


class Inputs(NamedTuple):
    """The batch of a call: keys int64 [rows, 2 or more], None for those of the first part's shard; where its columns come from, and the
    scalars."""

    keys: Index | None
    grouped: bool
    sources: Sequence[Source]
    scalars: Mapping[str, Data] = {}


NOTHING = Inputs(np.zeros((0, 2), np.int64), False, ())


class Call(NamedTuple):
    """One operation on a worker: ``op`` with ``arguments``; what it gives is kept under ``key``."""

    op: str
    key: int
    inputs: Inputs
    iteration: int = 0
    arguments: Mapping[str, Any] = {}
    forget: Sequence[int] = ()  # keys that nobody needs any more

    def __str__(self) -> str:
        """For whoever asks what a worker does."""
        of = self.arguments.get("function") or self.arguments.get("role")
        return f"{self.op}{f' of {of}' if of else ''} in iteration {self.iteration}"

    def packed(self, arguments: bytes) -> bytes:
        """``arguments``: those of the call, from ``pickled``, which are the same for all ranks."""
        keys, grouped, sources, scalars = self.inputs
        width = 0 if keys is None else keys.shape[1]
        inputs = (_raw(keys), width, grouped, [_source(each) for each in sources], _whole(scalars))
        frame: bytes = msgpack.packb((self.op, self.key, inputs, self.iteration, arguments, self.forget))
        return frame

    @staticmethod
    def unpacked(frame: bytes | memoryview) -> Call:
        op, key, (keys, width, grouped, sources, scalars), iteration, arguments, forget = msgpack.unpackb(frame, use_list=False)
        rows = _index(keys)
        inputs = Inputs(None if rows is None else rows.reshape(-1, width), grouped, [_opened(*each) for each in sources],
                        _scalars(scalars))
        return Call(op, key, inputs, iteration, cloudpickle.loads(arguments), forget)


def pickled(arguments: Mapping[str, Any]) -> bytes:
    found: bytes = cloudpickle.dumps(dict(arguments))  # type: ignore[no-untyped-call]
    return found


def _whole(scalars: Mapping[str, Data]) -> bytes | None:
    return pack(Batch(Axis.fresh(0), scalars)) if scalars else None


def _scalars(frame: bytes | None) -> Mapping[str, Data]:
    return unpack(frame).data if frame else {}


def _raw(index: Index | None) -> bytes | None:
    return None if index is None else index.tobytes()


def _index(raw: bytes | None) -> Index | None:
    return None if raw is None else np.frombuffer(raw, np.int64)


def _source(source: Source) -> tuple[Any, ...]:
    columns, parts, order, kinds = source
    return columns, [(key, _raw(rows)) for key, rows in parts], _raw(order), [(kind.level, kind.dtype) for kind in kinds]


def _opened(columns: Any, parts: Any, order: bytes | None, kinds: Any) -> Source:
    return Source(columns, [ShardRows(key, _index(rows)) for key, rows in parts], _index(order), [kind_of(*kind) for kind in kinds])


@functools.cache
def kind_of(level: str, dtype: str | None) -> Kind:
    return Kind(Level(level), dtype)


class Answer(NamedTuple):
    """key: what the shard is kept under. rows: how many it has. columns: name → kind and bytes. lengths: by level of the ragged
    columns. scalars come whole; ``value`` is what an operation gives that is no batch. ran: from when to when, by the wall clock, which
    several machines share."""

    key: int = 0
    rows: int = 0
    columns: Mapping[str, tuple[Kind, int]] = {}
    lengths: Mapping[str, Index] = {}
    scalars: Mapping[str, Data] = {}
    tallies: Mapping[str, PartialMetric] = {}
    value: Any = None
    ran: tuple[float, float] = (0.0, 0.0)

    def packed(self) -> bytes | Answer:
        """Bytes; where there is a value, which may be large, the answer itself."""
        if self.value is not None:
            return self
        columns = [(name, kind.level, kind.dtype, size) for name, (kind, size) in self.columns.items()]
        lengths = {level: each.tobytes() for level, each in self.lengths.items()}
        tallies = {name: (float(each.total), int(each.count), float(each.highest), each.kind) for name, each in self.tallies.items()}
        frame: bytes = msgpack.packb((self.key, self.rows, columns, lengths, _whole(self.scalars), tallies, self.ran))
        return frame

    @staticmethod
    def unpacked(frame: bytes | Answer) -> Answer:
        if isinstance(frame, Answer):
            return frame
        key, rows, columns, lengths, scalars, tallies, ran = msgpack.unpackb(frame)
        kinds = {name: (kind_of(level, dtype), size) for name, level, dtype, size in columns}
        return Answer(key, rows, kinds, {level: np.frombuffer(raw, np.int64) for level, raw in lengths.items()},
                      _scalars(scalars), {name: PartialMetric(*each) for name, each in tallies.items()}, ran=tuple(ran))
