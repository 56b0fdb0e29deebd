"""Transports: ways to move a packed bucket from rank to rank."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.training.weight_sync.transfer_plan import Round


class TransferError(RuntimeError):
    """Raised if a transfer fails because the received data doesn't match the plan or the data sent."""


class Transport(Protocol):
    """The protocol of a transport, which sends buckets between ranks.

    A rank packs a bucket into ``outbox``. After ``start``, the bucket is sent, and after ``wait``, it can be
    read in ``inbox``. Slots are buffers used in turn: with two of them, the next bucket can be packed while
    the previous one is read.
    """

    name: str  # as shown in weights.json and plans
    received: int  # total bytes received from other ranks
    copies: bool  # True if it needs its own memory for received messages

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate ``slots`` buffers. Every rank must call this.

        send, receive: bytes of the largest bucket that this rank sends or receives.
        """

    def outbox(self, slot: int) -> Tensor:
        """Return the buffer into which this rank packs the bucket in a slot, uint8 [send]."""

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """Return the bucket's messages to this rank, uint8, by sender. Every call for a slot returns the same
        memory."""

    def begin(self, version: int) -> None:
        """Begin a transfer of weights with this version."""

    def start(self, slot: int, bucket: Round) -> None:
        """Start sending the packed bucket and receiving this rank's messages."""

    def wait(self) -> None:
        """Wait until the bucket started last has arrived, for no longer than the group's timeout."""

    def release(self) -> None:
        """Report that this rank has read the bucket. Call this before packing the same slot again."""

    def versions(self) -> dict[int, int]:
        """Return the version of each sender's weights, for all messages since ``begin``."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of ``numbers``, int64, over all ranks, with wraparound."""

    def close(self) -> None:
        """Free the transport's memory."""


class AllToAll:
    """A transport that sends each bucket with one ``all_to_all_single``, over gloo or NCCL. ``device`` is
    where its buffers are, and must be supported by the group's collectives."""

    name = "alltoall"
    copies = True

    def __init__(self, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        self.group, self.device, self.received = group, torch.device(device), 0
        self._out: list[Tensor] = []
        self._in: list[Tensor] = []
        self._work: Any = None
        self._agreed: Any = None

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate ``slots`` buffers per direction.

        send, receive: bytes of the largest bucket that this rank sends or receives.
        """
        self._out = [torch.empty(send, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._in = [torch.empty(receive, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._versions = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=self.device)

    def outbox(self, slot: int) -> Tensor:
        """Return the buffer into which this rank packs the bucket in a slot, uint8."""
        return self._out[slot]

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """Return the bucket's messages to this rank, uint8, by sender."""
        ends = list(accumulate(bucket.received))
        return {
            peer: self._in[slot][end - size : end]
            for peer, (size, end) in enumerate(zip(bucket.received, ends, strict=True))
            if size
        }

    def begin(self, version: int) -> None:
        """Begin a transfer by sending the version of this rank's weights to all ranks."""
        own = torch.full((1,), version, dtype=torch.int64, device=self.device)
        self._agreed = dist.all_gather(
            list(torch.split(self._versions, 1)), own, group=self.group, async_op=True
        )

    def start(self, slot: int, bucket: Round) -> None:
        """Start the all-to-all of a packed bucket."""
        into, out = self._in[slot][: sum(bucket.received)], self._out[slot][: sum(bucket.sent)]
        self._work = dist.all_to_all_single(
            into, out, list(bucket.received), list(bucket.sent), group=self.group, async_op=True
        )
        self.received += into.numel()

    def wait(self) -> None:
        """Wait until the bucket's messages have arrived."""
        self._work.wait()

    def release(self) -> None:
        """Do nothing, since no other rank reads this rank's buffers."""

    def versions(self) -> dict[int, int]:
        """Return the version of each rank's weights."""
        self._agreed.wait()
        return dict(enumerate(self._versions.tolist()))

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of ``numbers`` over all ranks."""
        return summed(numbers, self.group, self.device)

    def close(self) -> None:
        """Free the buffers."""
        self._out, self._in = [], []


class Parcels:
    """Buffers for messages that the caller carries from ``Resharder.pack`` to ``Resharder.unpack``, for
    example in Ray's object store. The caller also sums the digests (``Verifier.terms``,
    ``Verifier.compare``)."""

    copies = False

    def __init__(self) -> None:
        self.received, self._out = 0, torch.empty(0, dtype=torch.uint8)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate one buffer for buckets of up to ``send`` bytes."""
        self._out = torch.empty(send, dtype=torch.uint8)

    def outbox(self, slot: int) -> Tensor:
        """Return the buffer into which this rank packs its messages, uint8."""
        return self._out

    def close(self) -> None:
        """Free the buffer."""
        self._out = torch.empty(0, dtype=torch.uint8)


def summed(numbers: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the sum of ``numbers`` over the group's ranks. It is computed on ``device`` and returned on the
    device of ``numbers``."""
    on_device = numbers.to(device, copy=True)
    dist.all_reduce(on_device, group=group)
    return on_device.to(numbers.device)
