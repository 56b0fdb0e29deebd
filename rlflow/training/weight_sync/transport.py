"""Transports: how a packed bucket moves from rank to rank."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.training.weight_sync.transfer_plan import Round


class TransferError(RuntimeError):
    """A failed transfer: the received data differ from the plan or from the sent data."""


class Transport(Protocol):
    """Sends buckets. A bucket is packed into ``outbox``, is sent after ``start``, and can be read in
    ``inbox`` after ``wait``. Slots are buffers used in rotation. With two slots, the next bucket can be
    packed while the previous one is read."""

    name: str  # as shown in weights.json and plans
    received: int  # total bytes received from other ranks
    copies: bool  # True if it needs its own memory for received messages

    def open(self, send: int, receive: int, slots: int) -> None:
        """Make buffers of this many bytes. Every rank must call it."""

    def outbox(self, slot: int) -> Tensor:
        """Return the buffer to pack a bucket into, uint8 [send]."""

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """Return the messages of a bucket by sender, uint8. Each call returns the same memory."""

    def begin(self, version: int) -> None:
        """Begin a transfer of weights of this version."""

    def start(self, slot: int, bucket: Round) -> None:
        """Start to send the bucket's outbox and to receive its inbox."""

    def wait(self) -> None:
        """Wait until the bucket that was started last has arrived, at most until the group's deadline."""

    def release(self) -> None:
        """Report that this rank has read the bucket. Call this before packing into the same slot again."""

    def versions(self) -> dict[int, int]:
        """Return sender → version of its weights, for all senders whose messages arrived since ``begin``."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of int64 numbers over all ranks; the sum wraps around."""

    def close(self) -> None:
        """Free the memory of the transport."""


class AllToAll:
    """One ``all_to_all_single`` per bucket, over gloo or NCCL. device: device of the buffers, which must be
    the device of the group's collectives."""

    name = "alltoall"
    copies = True

    def __init__(self, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        self.group, self.device, self.received = group, torch.device(device), 0
        self._out: list[Tensor] = []
        self._in: list[Tensor] = []
        self._work: Any = None
        self._agreed: Any = None

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate buffers. send, receive: bytes of the largest bucket; slots: number of buckets in
        transit."""
        self._out = [torch.empty(send, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._in = [torch.empty(receive, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._versions = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=self.device)

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs its messages of a slot, uint8."""
        return self._out[slot]

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """Return the messages of a bucket by sender, uint8."""
        ends = list(accumulate(bucket.received))
        return {
            peer: self._in[slot][end - size : end]
            for peer, (size, end) in enumerate(zip(bucket.received, ends, strict=True))
            if size
        }

    def begin(self, version: int) -> None:
        """Begin a transfer, and send the version of this rank's weights to all ranks."""
        own = torch.full((1,), version, dtype=torch.int64, device=self.device)
        self._agreed = dist.all_gather(
            list(torch.split(self._versions, 1)), own, group=self.group, async_op=True
        )

    def start(self, slot: int, bucket: Round) -> None:
        """Start to exchange the messages of a bucket."""
        into, out = self._in[slot][: sum(bucket.received)], self._out[slot][: sum(bucket.sent)]
        self._work = dist.all_to_all_single(
            into, out, list(bucket.received), list(bucket.sent), group=self.group, async_op=True
        )
        self.received += into.numel()

    def wait(self) -> None:
        """Wait until the messages of the bucket have arrived."""
        self._work.wait()

    def release(self) -> None:
        """Do nothing: each rank has its own buffers."""

    def versions(self) -> dict[int, int]:
        """Return the version of the weights on each rank."""
        self._agreed.wait()
        return dict(enumerate(self._versions.tolist()))

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over all ranks."""
        return summed(numbers, self.group, self.device)

    def close(self) -> None:
        """Free the buffers."""
        self._out, self._in = [], []


class Parcels:
    """Buffers without a transport: the caller carries messages from ``Resharder.pack`` to
    ``Resharder.unpack``, as objects of a store or in memory. The caller also sums the digests
    (``Verifier.terms``, ``compare``)."""

    copies = False

    def __init__(self) -> None:
        self.received, self._out = 0, torch.empty(0, dtype=torch.uint8)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate a buffer for the largest bucket."""
        self._out = torch.empty(send, dtype=torch.uint8)

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs its messages, uint8."""
        return self._out

    def close(self) -> None:
        """Free the buffer."""
        self._out = torch.empty(0, dtype=torch.uint8)


def summed(numbers: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the sum of ``numbers`` over the ranks of the group, on the device of ``numbers``."""
    on_device = numbers.to(device, copy=True)
    dist.all_reduce(on_device, group=group)
    return on_device.to(numbers.device)
