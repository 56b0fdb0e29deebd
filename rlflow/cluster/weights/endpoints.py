"""The two ends of weights that go from the ranks of one pool to those of another, by a plan: who packs, and who takes.

The driver tells each end its steps (``cluster.carrier``). All ends make the same plan from what all have told, and have numbers in it:
those that train first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rlflow.cluster.rpc.wire import viewed
from rlflow.cluster.weights.same_ranks import storages
from rlflow.execution.engine import Model
from rlflow.reshard.execute import Resharder
from rlflow.reshard.layout import TensorShard, WeightLayout, join
from rlflow.reshard.mailbox import Mailbox, SharedFile, opened
from rlflow.reshard.plan import TransferPlan
from rlflow.reshard.planner import BUCKET, make_plan
from rlflow.reshard.segment import machine
from rlflow.reshard.shards import held
from rlflow.reshard.transport import Parcels, TransferError, Transport

Told = dict[str, TensorShard]


@dataclass(frozen=True)
class Offer:
    """What a rank holds, or needs, and where it is."""

    held: Told
    machine: str
    device: str


@dataclass(frozen=True)
class Message:
    """Bytes from one rank to another: as they are, or from where to where they lie in the sender's shared memory."""

    version: int
    raw: NDArray[np.uint8] | tuple[int, int]


def layouts(senders: Sequence[Told], receivers: Sequence[Told]) -> tuple[WeightLayout, WeightLayout]:
    """What all hold and need, senders first."""
    return join([*senders, *({} for _ in receivers)]), join([*({} for _ in senders), *receivers])


@dataclass(frozen=True)
class Offers:
    """Of all ranks of both pools, and the bytes of a bucket: what a plan follows from."""

    senders: list[Offer]
    receivers: list[Offer]
    bucket: int = BUCKET

    def plan(self) -> TransferPlan:
        machines = [offer.machine for offer in (*self.senders, *self.receivers)]
        source, target = layouts([offer.held for offer in self.senders], [offer.held for offer in self.receivers])
        return make_plan(source, target, [machines.index(name) for name in machines], self.bucket)


class Sender:
    """A trainer's rank."""

    def __init__(self, model: Model, device: str) -> None:
        self.trainer: Any = model.trainer
        self.shown, self.device = model.has_pieces, device
        self.resharder: Resharder | None = None

    def begin(self) -> Offer | None:
        """What this rank holds; None where no plan can move it, as with adapters, which are merged first."""
        pieces = self.trainer.pieces() if self.shown else None
        return None if pieces is None else Offer(held(pieces), machine(), self.device)

    def bind(self, rank: int, offers: Offers, run: str | None) -> SharedFile | None:
        """Make buffers: in shared memory that ``run`` names, whose place is told, or in this process."""
        pieces = self.trainer.pieces()
        transport = Parcels() if run is None else Mailbox(run)
        self.resharder = Resharder(offers.plan(), rank, pieces, {}, cast(Transport, transport), buffers=1 if run is None else 2)
        self._at = storages(pieces)
        return transport.place if isinstance(transport, Mailbox) else None

    def hide(self) -> None:
        """All receivers have opened the shared memory."""
        if self.resharder is not None and isinstance(self.resharder.transport, Mailbox):
            self.resharder.transport.hide()

    def pack(self, index: int, version: int, kept: bool) -> list[Any]:
        """The version, once bucket ``index`` is packed, and then its messages. kept: they outlive the buffers."""
        assert self.resharder is not None
        if index == 0:
            self._look()
        transport = self.resharder.transport
        packed = self.resharder.pack(index).values()
        if isinstance(transport, Mailbox) and not kept:
            return [version, *(Message(version, transport.where(message)) for message in packed)]
        return [version, *(Message(version, message.numpy()) for message in packed)]

    def _look(self) -> None:
        """Other tensors may hold the weights now."""
        assert self.resharder is not None
        pieces = self.trainer.pieces()
        if (at := storages(pieces)) != self._at:
            self.resharder.relocate(pieces)
            self._at = at

    def terms(self) -> NDArray[np.int64]:
        """Of the digest of each box what this rank speaks for."""
        assert self.resharder is not None
        return self.resharder.verifier.terms().numpy()

    def close(self) -> None:
        if self.resharder is not None:
            self.resharder.close()


class Receiver:
    """A generator's rank."""

    def __init__(self, model: Model, device: str) -> None:
        self.generator: Any = model.generator
        self.shown, self.device, self.received = model.has_destinations, device, 0
        self.heard: dict[int, int] = {}
        self.files: list[torch.Tensor | None] = []

    def begin(self) -> bool:
        """Whether the engine shows where its weights lie."""
        return self.shown

    def offer(self, senders: list[Offer]) -> Offer:
        """What this rank needs. Its weights may be patterns afterwards: a whole transfer has to follow before anything is sampled."""
        self.destinations = self.generator.destinations(layouts([offer.held for offer in senders], [])[0].tensors)
        return Offer(held(self.destinations.pieces), machine(), self.device)

    def bind(self, rank: int, offers: Offers, places: list[SharedFile | None]) -> None:
        """places: the senders' shared memory, where they have any."""
        self.resharder = Resharder(offers.plan(), rank, {}, self.destinations.pieces, cast(Transport, Parcels()), buffers=1)
        self.files = [None if place is None else opened(place) for place in places]

    def take(self, index: int, senders: list[int], *messages: Message) -> None:
        """Bucket ``index``, a message from each of these."""
        raw = {sender: self._bytes(sender, message.raw) for sender, message in zip(senders, messages, strict=True)}
        self.resharder.unpack(index, raw)
        self.heard |= {sender: message.version for sender, message in zip(senders, messages, strict=True)}
        self.received += sum(part.numel() for part in raw.values())

    def _bytes(self, sender: int, raw: NDArray[np.uint8] | tuple[int, int]) -> torch.Tensor:
        if isinstance(raw, np.ndarray):
            return viewed(raw)
        memory = self.files[sender]
        assert memory is not None
        return memory[raw[0] : raw[1]]

    def finish(self, version: int, *terms: NDArray[np.int64]) -> dict[str, float]:
        """All is there. terms: the senders' digests, where they are to be compared. Gives the bytes that came, and the least that any plan
        could do with. Raises TransferError where that is not what was planned, or not what was sent."""
        received, heard, self.received, self.heard = self.received, self.heard, 0, {}
        if other := {sender: theirs for sender, theirs in heard.items() if theirs != version}:
            raise TransferError(f"rank {self.resharder.rank} takes version {version}, but ranks sent others: {other}")
        self.resharder.finish(version, received)
        if terms:
            self.resharder.verifier.compare(torch.from_numpy(np.sum(np.stack(terms), axis=0)))
        with self.generator.writing(version):
            self.destinations.finish(self.generator.load)
        return {"inbound": float(received), "bound": float(self.resharder.plan.stats.bound[self.resharder.rank])}

    def close(self) -> None:
        self.files = []


End = Sender | Receiver


def end_of(model: Model, device: str) -> End:
    """Of the half that is on this pool."""
    return Sender(model, device) if model.trainer is not None else Receiver(model, device)
