"""Rows of batches on their way from process to process: as bytes that Ray hands over, or in shared memory
where both ends have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.cluster.rpc.column_wire import BatchFrame, unpack
from rlflow.cluster.rpc.shared_memory import SMALL, SharedFrame, SharedInbox, SharedOutbox

Payload = NDArray[np.uint8]  # bytes that Ray hands over without a copy
Parcel = Payload | SharedFrame


def size_of(parcel: Parcel) -> int:
    """The bytes that go from one process to the other."""
    return parcel.size if isinstance(parcel, SharedFrame) else parcel.nbytes


def packed(batch: Batch, rows: Tensor | None = None) -> Payload:
    """The batch, or some of its rows, as bytes (`rlflow.cluster.rpc.column_wire`); whole numbers as int32
    where they fit."""
    return BatchFrame(batch, rows, narrow=True).written().numpy()


def opened(payload: Payload) -> Batch:
    """The batch of these bytes. Its tensors are views of them, but for whole numbers that travelled as
    int32."""
    batch = unpack(payload.data)
    return Batch(batch.axis, {name: widened(data) for name, data in batch.data.items()})


def widened(data: Data) -> Data:
    """The column with whole numbers of the dtype that its kind says."""
    if (
        data.kind.dtype != "int64"
        or not isinstance(data.value, Tensor)
        or data.value.dtype is not torch.int32
    ):
        return data
    return replace(data, value=data.value.to(torch.int64))


def inline(parcel: object) -> Parcel | None:
    """The parcel where it goes within a call's frame, as a place in shared memory and few bytes do; None for
    what Ray brings beside it."""
    few = isinstance(parcel, np.ndarray) and parcel.nbytes <= SMALL
    return parcel if few or isinstance(parcel, SharedFrame) else None  # type: ignore[return-value]


def _lasting(batch: Batch) -> Batch:
    """The batch with keys and lengths in memory of their own: few bytes that are remembered for longer than
    the columns."""
    data = {
        name: replace(data, lengths=data.lengths.clone()) if data.lengths is not None else data
        for name, data in batch.data.items()
    }
    return Batch(Axis(batch.axis.keys.clone(), grouped=batch.axis.grouped), data)


class Post:
    """Hands rows of this process to others, and takes theirs."""

    def __init__(self) -> None:
        self.outbox, self.inbox = SharedOutbox(), SharedInbox()

    def parcel(self, batch: Batch, rows: Tensor | None = None, *, shared: bool, iteration: int = 0) -> Parcel:
        """Rows for one receiver; ``rows``: which, None for all. ``shared``: whether the receiver can read
        this process's shared memory.
        ``iteration``: the one that they are for."""
        frame = BatchFrame(batch, rows, narrow=True)
        at = self.outbox.post(frame, iteration) if shared and frame.nbytes > SMALL else None
        return at if at is not None else frame.written().numpy()

    def opened(self, parcels: Sequence[Parcel]) -> list[Batch]:
        """The batches of parcels. Their tensors are views, of which each keeps the memory of its whole
        parcel. Whole numbers may be int32 where their kind says int64. Raises OSError where shared memory
        cannot be reached."""
        frames = [
            self.inbox.read(parcel).numpy() if isinstance(parcel, SharedFrame) else parcel
            for parcel in parcels
        ]
        return [_lasting(unpack(frame.data)) for frame in frames]

    def clear(self, iteration: int) -> None:
        """This iteration and those before it are over: their memory is given back."""
        self.outbox.clear(iteration)
        self.inbox.clear()

    def reaches(self, at: SharedFrame) -> bool:
        """Whether this process can read the shared memory of another."""
        try:
            return len(self.opened([at])) == 1
        except OSError:
            return False
