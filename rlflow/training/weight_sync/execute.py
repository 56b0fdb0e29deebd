"""Run a transfer plan on one rank. The plan is bound to the rank's live memory once, and then runs after
every update."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author import torch_private
from rlflow.errors import PlanError
from rlflow.training.weight_sync.boxes import Box, lengths, volume
from rlflow.training.weight_sync.layout import TensorShard
from rlflow.training.weight_sync.shards import TensorViews
from rlflow.training.weight_sync.transfer_plan import Leg, Round, TransferPlan
from rlflow.training.weight_sync.transport import TransferError, Transport
from rlflow.training.weight_sync.verify import Verifier


@dataclass(frozen=True, eq=False)
class Copies:
    """Pairs of a source tensor and the destination it is copied to, both on this rank."""

    into: list[Tensor]
    out_of: list[Tensor]

    @staticmethod
    def of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Copies:
        """Return the copies for (destination, source) pairs."""
        pairs = list(pairs)
        return Copies([into for into, _ in pairs], [out_of for _, out_of in pairs])

    def make(self) -> None:
        """Copy every source to its destination, converting it to the destination's dtype."""
        if self.into:
            torch_private.copy_all(self.into, self.out_of)


class Resharder:
    """Moves weights from the ``source`` views of all ranks to their ``target`` views. Every rank creates its
    own Resharder from the same plan, and calls the same methods in the same order.

    source: views of the weights that this rank holds. If their memory moves, call ``relocate``. target: views
    of the memory that it must fill. If this memory moves, create a new Resharder. buffers: with 2, the next
    bucket is packed while another is being sent; 1 takes half the memory. verify_every: compare digests after
    every ``verify_every``-th run, or never if 0.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        source: Mapping[str, TensorViews],
        target: Mapping[str, TensorViews],
        transport: Transport,
        *,
        buffers: int = 2,
        verify_every: int = 0,
    ) -> None:
        _check_bound(plan, rank, source, target)
        self.plan = plan
        self.rank = rank
        self.transport = transport
        self.buffers = buffers
        self.verify_every = verify_every
        self.source, self.target, self.version, self.runs = source, target, -1, 0
        self.rounds = [plan.round(index, rank) for index in range(len(plan.buckets))]
        self.verifier = Verifier(plan, rank, source, target)
        self._local = self._own()
        self._bound: dict[tuple[int, int, bool], Copies] = {}
        self._slot = 0
        if self.rounds:
            sent, received = (int(side[rank]) for side in plan.stats.largest)
            transport.open(sent, received, buffers)

    # -- a whole transfer
    # --------------------------------------------------------------------------------------------------------

    def run(self, version: int) -> None:
        """Copy the trainers' current weights, which have this version, to every destination.

        Raises TransferError if ranks have different versions, if the number of received bytes differs from
        the plan, or if a digest differs.
        """
        before = self.transport.received
        if self.rounds:
            self._exchange(version)
        else:
            self.copy_local()
        self.finish(version, self.transport.received - before)
        if self.verify_every and self.runs % self.verify_every == 0:
            self.verify()

    def _exchange(self, version: int) -> None:
        self.transport.begin(version)
        self._send(0)
        self.copy_local()
        for index in range(len(self.rounds)):
            self._take(index)
        self._check_versions(version)

    def _send(self, index: int) -> None:
        self._slot = (self._slot + 1) % self.buffers
        self._pack(index, self._slot).make()
        self.transport.start(self._slot, self.rounds[index])

    def _take(self, index: int) -> None:
        """Wait until bucket ``index`` has arrived, start the next one, and then unpack bucket ``index``."""
        more, slot = index + 1 < len(self.rounds), self._slot
        self.transport.wait()
        if more and self.buffers > 1:
            self._send(index + 1)
        self._unpack(index, slot).make()
        if self.buffers == 1:
            self.transport.release()
            if more:
                self._send(index + 1)

    def _check_versions(self, version: int) -> None:
        if other := {rank: sent for rank, sent in self.transport.versions().items() if sent != version}:
            raise TransferError(
                f"rank {self.rank} takes version {version}, but these ranks send other versions: {other}"
            )

    def verify(self) -> None:
        """Raise TransferError if the digests of this rank's destinations differ from those of the trainers'
        weights. Every rank must call this."""
        self.verifier.check(self.transport.total)

    def close(self) -> None:
        """Release the bound memory and close the transport. The Resharder can't be used afterwards."""
        self._bound.clear()
        self.transport.close()

    # -- its steps, for callers that carry the messages themselves
    # -------------------------------------------------------------------

    def copy_local(self) -> None:
        """Copy the elements that this rank both holds and needs."""
        self._local.make()

    def pack(self, index: int) -> dict[int, Tensor]:
        """Pack bucket ``index`` and return its messages, uint8, by receiving rank.

        Ranks that need the same elements share a message, stored under the first of them (``Round.first``). A
        message's memory is reused ``buffers`` buckets later.
        """
        bucket, slot = self.rounds[index], index % self.buffers
        if (index, slot, True) not in self._bound:
            departures = self._departures(bucket, self.transport.outbox(slot), set(bucket.first.values()))
            self._bound[index, slot, True] = Copies.of(departures)
        self._bound[index, slot, True].make()
        parts = torch.split(self.transport.outbox(slot)[: sum(bucket.sent)], list(bucket.sent))
        return {peer: parts[peer] for peer in dict.fromkeys(bucket.first.values())}

    def relocate(self, source: Mapping[str, TensorViews]) -> None:
        """Use ``source`` as the new memory of this rank's shards, whose boxes must be those of the plan."""
        _check_bound(self.plan, self.rank, source, self.target)
        self.source, self.verifier = source, Verifier(self.plan, self.rank, source, self.target)
        self._bound.clear()
        self._local = self._own()

    def unpack(self, index: int, messages: Mapping[int, Tensor]) -> None:
        """Unpack bucket ``index`` into the destinations. ``messages`` has the messages by sending rank.
        Raises TransferError if one is missing or has the wrong length."""
        expected = {peer: size for peer, size in enumerate(self.rounds[index].received) if size}
        if (sizes := {peer: message.numel() for peer, message in messages.items()}) != expected:
            raise TransferError(
                f"rank {self.rank} received bytes {sizes} by sender in bucket {index}, the plan says "
                f"{expected}"
            )
        Copies.of(self._arrivals(self.rounds[index], messages)).make()

    def finish(self, version: int, received: int) -> None:
        """Complete a transfer of weights with this version. Raises TransferError if the number of bytes
        ``received`` from other ranks differs from the plan."""
        if received != (expected := int(self.plan.stats.inbound[self.rank])):
            raise TransferError(f"rank {self.rank} received {received} bytes, the plan says {expected}")
        self.version, self.runs = version, self.runs + 1

    # -- copies and their memory
    # ----------------------------------------------------------------------------------------------------

    def _pack(self, index: int, slot: int) -> Copies:
        if (index, slot, True) not in self._bound:
            self._bound[index, slot, True] = Copies.of(
                self._departures(self.rounds[index], self.transport.outbox(slot))
            )
        return self._bound[index, slot, True]

    def _unpack(self, index: int, slot: int) -> Copies:
        if (index, slot, False) not in self._bound:
            bucket = self.rounds[index]
            self._bound[index, slot, False] = Copies.of(
                self._arrivals(bucket, self.transport.inbox(slot, bucket))
            )
        return self._bound[index, slot, False]

    def _departures(
        self, bucket: Round, outbox: Tensor, to: Container[int] | None = None
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield (place in the outbox, source) for each box of the bucket that this rank sends to the ranks in
        ``to``, or to any rank if None."""
        flat = outbox[: sum(bucket.sent)].view(getattr(torch, bucket.dtype))
        for view, leg in zip(_views(flat, bucket.sends), bucket.sends, strict=True):
            if to is None or leg.peer in to:
                yield view, self._held(leg.name, leg.box)

    def _arrivals(self, bucket: Round, messages: Mapping[int, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
        dtype = getattr(torch, bucket.dtype)
        for peer, message in messages.items():
            legs = [leg for leg in bucket.receives if leg.peer == peer]
            for view, leg in zip(_views(message.view(dtype), legs), legs, strict=True):
                yield from ((piece.at(leg.box), view) for piece in self.target[leg.name].around(leg.box))

    def _own(self) -> Copies:
        """Return the copies of elements that this rank both holds and needs."""
        return Copies.of(
            pair for name, box in self.plan.local(self.rank) for pair in self._straight(name, box)
        )

    def _straight(self, name: str, box: Box) -> Iterable[tuple[Tensor, Tensor]]:
        return ((piece.at(box), self._held(name, box)) for piece in self.target[name].around(box))

    def _held(self, name: str, box: Box) -> Tensor:
        return self.source[name].around(box)[0].at(box)


def _views(flat: Tensor, legs: Sequence[Leg]) -> Iterable[Tensor]:
    """Yield a view of each box's elements in the flat message, in the shape of the box."""
    sizes = [volume(leg.box) for leg in legs]
    return (
        (part.view(lengths(leg.box)) for part, leg in zip(torch.split(flat, sizes), legs, strict=True))
        if legs
        else ()
    )


def _check_bound(
    plan: TransferPlan, rank: int, source: Mapping[str, TensorViews], target: Mapping[str, TensorViews]
) -> None:
    for side, layout, pieces in (("holds", plan.source, source), ("needs", plan.target, target)):
        for name, expected in layout.of(rank).items():
            bound = pieces[name].held() if name in pieces else TensorShard(expected.shape, expected.dtype, ())
            if bound != expected:
                raise PlanError.of(
                    "reshard-bound",
                    f"the part of {name!r} that rank {rank} {side} differs from the plan",
                    found=str(bound),
                    expected=str(expected),
                    remedy="make the plan from the layouts of the tensors that are bound",
                )
