"""Rows of batches on their way from process to process: as bytes that Ray hands over, or in shared memory where both ends have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.shared_memory import SMALL, SharedFrame, SharedInbox, SharedOutbox
from rlflow.cluster.rpc.wire import BatchFrame, unpack

Payload = NDArray[np.uint8]  # bytes that Ray hands over without a copy
Parcel = Payload | SharedFrame


def packed(batch: Batch, rows: Tensor | None = None) -> Payload:
    """The batch, or some of its rows, as bytes (`rlflow.cluster.rpc.wire`); whole numbers as int32 where they fit."""
    return _written(BatchFrame(batch, rows, narrow=True))


def _written(frame: BatchFrame) -> Payload:
    memory = torch.empty(frame.nbytes, dtype=torch.uint8)
    frame.write(memory)
    return memory.numpy()


def opened(payload: Payload) -> Batch:
    """The batch of these bytes. Its tensors are views of them, but for whole numbers that travelled as int32."""
    batch = unpack(payload.data)
    return Batch(batch.axis, {name: widened(data) for name, data in batch.data.items()})


def widened(data: Data) -> Data:
    """The column with whole numbers of the dtype that its kind says."""
    if data.kind.dtype != "int64" or not isinstance(data.value, Tensor) or data.value.dtype is not torch.int32:
        return data
    return replace(data, value=data.value.to(torch.int64))


class Post:
    """Hands rows of this process to others, and takes theirs."""

    def __init__(self) -> None:
        self.outbox, self.inbox = SharedOutbox(), SharedInbox()

    def parcel(self, batch: Batch, rows: Tensor | None = None, *, shared: bool, iteration: int = 0) -> Parcel:
        """Rows for one receiver; ``rows``: which, None for all. ``shared``: whether the receiver can read this process's shared memory.
        ``iteration``: the one that they are for."""
        frame = BatchFrame(batch, rows, narrow=True)
        at = self.outbox.post(frame, iteration) if shared and frame.nbytes > SMALL else None
        return at if at is not None else _written(frame)

    @contextlib.contextmanager
    def opened(self, parcels: Sequence[Parcel]) -> Iterator[list[Batch]]:
        """The batches of parcels, whose tensors are views that end with the block: whoever keeps rows copies them. Whole numbers may be
        int32 where their kind says int64."""
        shared = [parcel for parcel in parcels if isinstance(parcel, SharedFrame)]
        try:
            yield [unpack((self.inbox.read(parcel).numpy() if isinstance(parcel, SharedFrame) else parcel).data) for parcel in parcels]
        finally:
            for parcel in shared:
                with contextlib.suppress(OSError):
                    self.inbox.done(parcel)

    def reaches(self, at: SharedFrame) -> bool:
        """Whether this process can read the shared memory of another."""
        try:
            with self.opened([at]) as batches:
                return len(batches) == 1
        except OSError:
            return False
