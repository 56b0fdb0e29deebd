"""A worker's store of shards, which also puts together the batch of a call from shards and incoming rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, empty
from rlflow.author.copy_on_write import file_memory, writable_copy
from rlflow.cluster.rpc.message import Index, Inputs, Source
from rlflow.cluster.rpc.row_messages import RowMailbox, RowMessage
from rlflow.cluster.sharding.gather import gathered


class ShardStore:
    """A worker's shards, by key. Safe to use from several threads."""

    def __init__(self) -> None:
        self.mailbox = RowMailbox()
        self._held: dict[int, Batch] = {}
        self._iterations: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, key: int, batch: Batch, iteration: int = 0) -> None:
        """Store a batch as a shard under ``key`` until ``iteration`` ends."""
        with self._lock:
            self._held[key], self._iterations[key] = batch, iteration

    def get(self, key: int) -> Batch:
        """Return the shard with this key. Raises KeyError if there is none."""
        return self._held[key]

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the shards with these keys. Keys without a shard are ignored."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
                self._iterations.pop(key, None)

    def clear(self, iteration: int) -> None:
        """Drop all shards stored for this iteration or earlier ones."""
        with self._lock:
            for key in [key for key, for_one in self._iterations.items() if for_one <= iteration]:
                self._held.pop(key, None)
                del self._iterations[key]
        self.mailbox.clear(iteration)

    def __len__(self) -> int:
        return len(self._held)

    def slice(
        self, key: int, names: Sequence[str], rows: Index | None, shared: bool = False, iteration: int = 0
    ) -> RowMessage:
        """Return rows of some of a shard's columns, as a message for another worker.

        ``names``: the columns. ``rows``: row indices, or None for all rows. ``shared``: whether the receiver
        can read this process's shared memory. ``iteration``: the iteration that uses the rows.
        """
        which = None if rows is None else torch.tensor(rows)
        return self.mailbox.message(self._held[key].select(*names), which, shared=shared, iteration=iteration)

    def batch(self, inputs: Inputs, transfers: Sequence[RowMessage], iteration: int = 0) -> Batch:
        """Return a call's batch, joined from stored shards and rows of other workers.

        ``transfers``: the messages from other workers, in the order in which ``inputs`` uses them. If the
        inputs ask for it, incoming rows are also stored until ``iteration`` ends.
        """
        axis = self._axis(inputs)
        columns: dict[str, Data] = {}
        coming = iter(self.mailbox.opened(transfers))
        for source in inputs.sources:
            columns |= self._columns(source, coming, len(axis), iteration)
        return Batch(axis, columns | dict(inputs.scalars))

    def _axis(self, inputs: Inputs) -> Axis:
        if inputs.keys is not None:
            return Axis(torch.tensor(inputs.keys), grouped=inputs.grouped)
        key = inputs.sources[0].parts[0].key
        assert key is not None
        return self._held[key].axis

    def _columns(self, source: Source, coming: Iterator[Batch], rows: int, iteration: int) -> dict[str, Data]:
        key, index = source.parts[0] if len(source.parts) == 1 else (None, None)
        # a full shard, unchanged
        if key is not None and index is None and len(stored := self._held[key]) == rows:
            return {wanted: _borrowed(stored.data[name]) for wanted, name in source.columns}
        if not source.parts:
            return {
                wanted: empty(kind) for (wanted, _), kind in zip(source.columns, source.kinds, strict=True)
            }
        names = tuple(dict.fromkeys(name for _, name in source.columns))
        parts = [
            (
                next(coming) if part.key is None else self._held[part.key].select(*names),
                None if part.rows is None else torch.tensor(part.rows),
            )
            for part in source.parts
        ]
        whole = gathered(parts, names, None if source.order is None else torch.tensor(source.order))
        if len(whole) != rows:
            raise ValueError(f"found {len(whole)} rows of {', '.join(names)}, expected {rows}")
        if source.keep is None:
            return {wanted: whole.data[name] for wanted, name in source.columns}
        self.put(source.keep, whole, iteration)
        return {wanted: _borrowed(whole.data[name]) for wanted, name in source.columns}


def _borrowed(data: Data) -> Data:
    """Return a column with new tensor objects over the same memory, for use in one call.

    Threads must not share torch tensors, because backends read tensor addresses, and doing so can move the
    memory.
    """
    own = isinstance(data.value, torch.Tensor) and file_memory(data.value) is None
    return replace(data, value=writable_copy(data.value)) if own else data
