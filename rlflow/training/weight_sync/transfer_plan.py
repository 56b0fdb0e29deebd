"""What the planner returns: which rank sends which elements to which rank in each bucket, and how many bytes
that takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlflow.training.weight_sync.boxes import Box
from rlflow.training.weight_sync.layout import WeightLayout, width

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moves:
    """The pieces of a tensor that move, as arrays of senders [P], receivers [P] and boxes [P, ndim, 2]."""

    sender: Numbers
    receiver: Numbers
    boxes: Numbers

    def __len__(self) -> int:
        return len(self.sender)

    @cached_property
    def elements(self) -> Numbers:
        """The number of elements in each piece, int64 [P]."""
        counts: Numbers = np.prod(self.boxes[:, :, 1] - self.boxes[:, :, 0], axis=1, dtype=np.int64)
        return counts

    def take(self, index: Numbers) -> Moves:
        """Return the moves with these indices, in this order."""
        return Moves(self.sender[index], self.receiver[index], self.boxes[index])

    @cached_property
    def _by_sender(self) -> Numbers:
        order: Numbers = np.lexsort((self.receiver, self.sender))
        return order

    @cached_property
    def _by_receiver(self) -> Numbers:
        order: Numbers = np.lexsort((self.sender, self.receiver))
        return order

    def sent_by(self, rank: int) -> list[tuple[int, Box]]:
        """Return (receiver, box) of each piece that ``rank`` sends, sorted by receiver."""
        return self._picked(self._by_sender, self.sender, self.receiver, rank)

    def received_by(self, rank: int) -> list[tuple[int, Box]]:
        """Return (sender, box) of each piece that ``rank`` receives, sorted by sender."""
        return self._picked(self._by_receiver, self.receiver, self.sender, rank)

    def _picked(self, order: Numbers, own: Numbers, peers: Numbers, rank: int) -> list[tuple[int, Box]]:
        low, high = np.searchsorted(own[order], [rank, rank + 1])
        index = order[low:high]
        boxes = (tuple(map(tuple, box)) for box in self.boxes[index].tolist())
        return list(zip(peers[index].tolist(), boxes, strict=True))

    def traffic(self, ranks: int) -> Numbers:
        """Return how many elements each sender (row) sends to each receiver (column), int64 [ranks,
        ranks]."""
        flat = np.bincount(self.sender * ranks + self.receiver, self.elements, ranks * ranks)
        return flat.astype(np.int64).reshape(ranks, ranks)


@dataclass(frozen=True, eq=False)
class Template:
    """The moves of a tensor, shared by all tensors with the same shape and layout."""

    parts: tuple[Moves, ...]  # moves in parts, each small enough for a bucket
    local: Moves  # moves within a rank
    missing: Numbers  # [ranks], elements that each rank needs and does not hold
    outbound: tuple[Numbers, ...] = ()  # for each part, [ranks], elements that each rank sends
    inbound: tuple[Numbers, ...] = ()  # for each part, [ranks], elements that each rank receives


@dataclass(frozen=True)
class Item:
    """One part of a tensor's moves in a bucket: the tensor's name, the number of its template, and the number
    of the part."""

    name: str
    template: int
    part: int


@dataclass(frozen=True)
class Bucket:
    """Parts of tensors that are sent together, in a single dtype."""

    dtype: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Leg:
    """A box of a tensor that this rank sends to or receives from the rank ``peer``."""

    peer: int
    name: str
    box: Box


def firsts(sends: Iterable[Leg]) -> dict[int, int]:
    """For each receiver, return the first receiver that gets exactly the same elements, possibly itself."""
    legs: dict[int, list[tuple[str, Box]]] = {}
    for leg in sends:
        legs.setdefault(leg.peer, []).append((leg.name, leg.box))
    first_of: dict[tuple[tuple[str, Box], ...], int] = {}
    return {peer: first_of.setdefault(tuple(elements), peer) for peer, elements in legs.items()}


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives in one bucket. Legs are sorted by peer, in the order of the
    messages."""

    dtype: str
    sends: tuple[Leg, ...]
    receives: tuple[Leg, ...]
    sent: tuple[int, ...]  # bytes to each rank
    received: tuple[int, ...]  # bytes from each rank
    offsets: tuple[int, ...]  # bytes before the message to this rank in the bucket of each rank

    @cached_property
    def first(self) -> dict[int, int]:
        """For each receiver, the first receiver that gets exactly the same elements. They share a message."""
        return firsts(self.sends)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """All moves that turn one layout of a model into another, split into buckets."""

    ranks: int  # ranks of trainers and generators together
    limit: int  # maximum size of a bucket in bytes, for each rank and direction
    templates: tuple[Template, ...]  # templates, indexed by their number
    names: Mapping[str, tuple[int, str]]  # tensor → (number of its template, dtype on the wire)
    buckets: tuple[Bucket, ...]  # in transfer order
    source: WeightLayout  # layout of the trainers
    target: WeightLayout  # layout of the generators
    unused: tuple[str, ...] = ()  # tensors of the trainer that no generator needs

    def moves(self) -> Iterator[tuple[str, str, Moves]]:
        """Yield (tensor name, dtype on the wire, pieces) for everything that is sent."""
        for bucket in self.buckets:
            for item in bucket.items:
                yield item.name, bucket.dtype, self.templates[item.template].parts[item.part]

    def local(self, rank: int) -> list[tuple[str, Box]]:
        """Return (tensor name, box) for everything that ``rank`` copies within its own memory."""
        boxes_of = [template.local.sent_by(rank) for template in self.templates]
        return [(name, box) for name, (template, _) in self.names.items() for _, box in boxes_of[template]]

    def round(self, index: int, rank: int) -> Round:
        """Return what ``rank`` sends and receives in bucket ``index``."""
        bucket, sends = self.buckets[index], self.sends(index, rank)
        receives = self._pieces(bucket, [part.received_by(rank) for part in self._parts(bucket)])
        traffic = self.traffic(index) * width(bucket.dtype)
        offsets = traffic[:, :rank].sum(axis=1)
        return Round(
            bucket.dtype,
            sends,
            receives,
            *(tuple(row.tolist()) for row in (traffic[rank], traffic[:, rank], offsets)),
        )

    def sends(self, index: int, rank: int) -> tuple[Leg, ...]:
        """Return the boxes that ``rank`` sends in bucket ``index``, sorted by receiver."""
        bucket = self.buckets[index]
        return self._pieces(bucket, [part.sent_by(rank) for part in self._parts(bucket)])

    def _parts(self, bucket: Bucket) -> list[Moves]:
        return [self.templates[item.template].parts[item.part] for item in bucket.items]

    def _pieces(self, bucket: Bucket, pieces_of: list[list[tuple[int, Box]]]) -> tuple[Leg, ...]:
        pairs = zip(bucket.items, pieces_of, strict=True)
        pieces = [Leg(peer, item.name, box) for item, moved in pairs for peer, box in moved]
        # stable: within a peer both sides keep the order of the bucket
        return tuple(sorted(pieces, key=lambda piece: piece.peer))

    def traffic(self, index: int) -> Numbers:
        """Return how many elements each sender (row) sends to each receiver (column) in bucket ``index``,
        int64 [ranks, ranks]."""
        total = np.zeros((self.ranks, self.ranks), np.int64)
        for part in self._parts(self.buckets[index]):
            total += part.traffic(self.ranks)
        return total

    @cached_property
    def stats(self) -> Stats:
        """How many bytes each rank sends, receives and copies."""
        return Stats.of(self)


@dataclass(frozen=True, eq=False)
class Stats:
    """Byte counts of a transfer. Each array has one number per rank."""

    inbound: Numbers  # received
    outbound: Numbers  # sent
    local: Numbers  # copied within the rank
    bound: Numbers  # needed but not held: the minimum of any plan without compression
    largest: tuple[Numbers, Numbers]  # (most that a rank sends in one bucket, most that it receives)

    @staticmethod
    def of(plan: TransferPlan) -> Stats:
        """Compute a plan's statistics, without moving anything."""
        zero = np.zeros(plan.ranks, np.int64)
        inbound, outbound, local, bound = zero.copy(), zero.copy(), zero.copy(), zero.copy()
        sent, received = zero.copy(), zero.copy()
        for bucket in plan.buckets:
            out, into, size = zero.copy(), zero.copy(), width(bucket.dtype)
            for item in bucket.items:
                template = plan.templates[item.template]
                out += template.outbound[item.part] * size
                into += template.inbound[item.part] * size
            inbound, outbound = inbound + into, outbound + out
            sent, received = np.maximum(sent, out), np.maximum(received, into)
        local_elements = [by_rank(t.local.receiver, t.local.elements, plan.ranks) for t in plan.templates]
        for index, dtype in plan.names.values():
            local += local_elements[index] * width(dtype)
            bound += plan.templates[index].missing * width(dtype)
        return Stats(inbound, outbound, local, bound, (sent, received))

    def peak(self, rank: int, buffers: int = 2, *, receives: bool = True) -> int:
        """Return how many bytes of buffers a transfer needs on a rank, on top of the model.

        buffers: how many per direction. receives: True if the transport has its own receive buffers, as
        all-to-all does, and False for shared memory. The result is at most 2 buckets with one buffer per
        direction, and 4 with two.
        """
        sent, received = (int(side[rank]) for side in self.largest)
        return buffers * (sent + (received if receives else 0))

    def extra(self, transport: str) -> int:
        """Return the most bytes that a transfer with this transport needs on any rank, on top of the model.

        With ``store``, Ray's object store, the sender has one buffer, the store holds the messages of two
        buckets, and the store of a receiver on another machine holds these messages again. With ``frozen``,
        the store holds everything that a sender sends.
        """
        sent, received = (int(side.max(initial=0)) for side in self.largest)
        return {
            "segment": 2 * sent,
            "handles": 2 * sent,
            "alltoall": 2 * (sent + received),
            "store": max(3 * sent, 2 * received),
            "frozen": max(sent + int(self.outbound.max(initial=0)), 2 * received),
        }[transport]


def by_rank(rank: Numbers, elements: Numbers, ranks: int) -> Numbers:
    """Sum ``elements`` by rank, int64 [ranks]. ``rank`` says which rank each entry belongs to."""
    return np.bincount(rank, elements, ranks).astype(np.int64)


def readable(count: int) -> str:
    """Format a number of bytes with a unit, such as 1.50 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
