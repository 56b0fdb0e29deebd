"""How a packed bucket gets from rank to rank."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.training.weight_sync.transfer_plan import Round


class TransferError(RuntimeError):
    """A transfer went wrong: what arrived is not what the plan says, or not what was sent."""


class Transport(Protocol):
    """A bucket is packed into ``outbox``, on its way from ``start`` on, and after ``wait`` readable in
    ``inbox``. Slots are buffers that are used in turn; a transport with two lets the next bucket be packed
    while the last one is still read."""

    name: str  # as weights.json and a plan say it
    received: int  # bytes that came from other ranks, ever
    copies: bool  # whether it needs memory of its own for what comes

    def open(self, send: int, receive: int, slots: int) -> None:
        """Make buffers of so many bytes. Every rank calls it."""

    def outbox(self, slot: int) -> Tensor:
        """The buffer into which a bucket is packed, uint8 [send]."""

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """The messages of a bucket by sender, uint8. Each lies at the same place whenever it is asked for."""

    def begin(self, version: int) -> None:
        """Begin a transfer of weights of this version."""

    def start(self, slot: int, bucket: Round) -> None:
        """Begin to send the bucket's outbox and to receive its inbox."""

    def wait(self) -> None:
        """Wait until the bucket that was started last has come, at most until the deadline of the group."""

    def release(self) -> None:
        """Say that this rank has read the bucket. It is called where the same slot is to be packed next."""

    def versions(self) -> dict[int, int]:
        """Sender → version of the weights that it sent, for the ranks heard from since ``begin``."""

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of int64 numbers over all ranks, which wraps around."""

    def close(self) -> None:
        """Free the memory of the transport."""


class AllToAll:
    """One ``all_to_all_single`` for a bucket, over gloo or NCCL. device: where buffers lie; that of the
    group's collectives."""

    name = "alltoall"
    copies = True

    def __init__(self, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        self.group, self.device, self.received = group, torch.device(device), 0
        self._out: list[Tensor] = []
        self._in: list[Tensor] = []
        self._work: Any = None
        self._agreed: Any = None

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate buffers. send, receive: bytes of the largest bucket; slots: buckets under way at once."""
        self._out = [torch.empty(send, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._in = [torch.empty(receive, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self._versions = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=self.device)

    def outbox(self, slot: int) -> Tensor:
        """The memory into which this rank packs its messages of a slot, uint8."""
        return self._out[slot]

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """The messages of a bucket by sender, uint8."""
        ends = list(accumulate(bucket.received))
        return {
            peer: self._in[slot][end - size : end]
            for peer, (size, end) in enumerate(zip(bucket.received, ends, strict=True))
            if size
        }

    def begin(self, version: int) -> None:
        """Begin a transfer, and tell all ranks the version of this rank's weights."""
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
        """Buffers are this rank's own."""

    def versions(self) -> dict[int, int]:
        """The version of the weights on each rank."""
        self._agreed.wait()
        return dict(enumerate(self._versions.tolist()))

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of numbers over all ranks."""
        return summed(numbers, self.group, self.device)

    def close(self) -> None:
        """Give the buffers back."""
        self._out, self._in = [], []


class Parcels:
    """No transport: messages are carried from ``Resharder.pack`` to ``Resharder.unpack`` by somebody else, as
    objects of a store or in memory. Digests are added up there as well: ``Verifier.terms`` and
    ``compare``."""

    copies = False

    def __init__(self) -> None:
        self.received, self._out = 0, torch.empty(0, dtype=torch.uint8)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate a buffer for the largest bucket."""
        self._out = torch.empty(send, dtype=torch.uint8)

    def outbox(self, slot: int) -> Tensor:
        """The memory into which this rank packs its messages, uint8."""
        return self._out

    def close(self) -> None:
        """Give the buffer back."""
        self._out = torch.empty(0, dtype=torch.uint8)


def summed(numbers: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The sum of ``numbers`` over the ranks of the group, where ``numbers`` lie."""
    there = numbers.to(device, copy=True)
    dist.all_reduce(there, group=group)
    return there.to(numbers.device)
