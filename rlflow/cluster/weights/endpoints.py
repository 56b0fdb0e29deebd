"""The two ends of a weight transfer between pools: senders pack weights, and receivers unpack them.

The driver (`rlflow.cluster.weights.transfer`) calls the steps of each end. First, every rank makes an offer,
which describes its weights. From all the offers, every rank computes the same plan, in which senders are
numbered before receivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rlflow.cluster.weights.same_ranks import storages
from rlflow.execution.role_model import Model
from rlflow.execution.wire.column_wire import viewed
from rlflow.training.following import empty_like, move
from rlflow.training.protocols import ShowsDestinations, ShowsPieces
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.layout import TensorShard, WeightLayout, join
from rlflow.training.weight_sync.mailbox import Mailbox
from rlflow.training.weight_sync.planner import BUCKET, make_plan
from rlflow.training.weight_sync.proof import Destinations
from rlflow.training.weight_sync.segment import SharedFile, machine
from rlflow.training.weight_sync.shards import TensorViews, held, pieces_of
from rlflow.training.weight_sync.transfer_plan import TransferPlan
from rlflow.training.weight_sync.transport import Parcels, TransferError, Transport

Shards = dict[str, TensorShard]  # tensor → its part on one rank


@dataclass(frozen=True)
class Following:
    """What a transfer is for if it moves a trainer's weights towards those of a trainer on another pool."""

    role: str  # the role whose weights move
    other: str  # the role that it follows
    mix: float  # share of the way


What = str | Following  # a role whose generator gets its trainer's weights, or a role that follows another


@dataclass(frozen=True)
class Offer:
    """The weights that a rank has or needs, with its machine and device."""

    shards: Shards  # parts that a sender has, or that a receiver needs
    machine: str
    device: str


@dataclass(frozen=True)
class Message:
    """A message with weights from a sender to a receiver."""

    version: int  # version of the weights
    # the bytes, or their start and end in the sender's shared memory
    raw: NDArray[np.uint8] | tuple[int, int]


def layouts(senders: Sequence[Shards], receivers: Sequence[Shards]) -> tuple[WeightLayout, WeightLayout]:
    """Return the layouts over all ranks of the senders' weights and of the receivers' weights.

    ``senders``, ``receivers``: the parts of tensors on each rank. Senders are numbered before receivers.
    """
    return join([*senders, *({} for _ in receivers)]), join([*({} for _ in senders), *receivers])


@dataclass(frozen=True)
class Offers:
    """The offers of all ranks of both pools, which determine the plan."""

    senders: list[Offer]
    receivers: list[Offer]
    bucket: int = BUCKET  # bytes of a bucket

    def plan(self) -> TransferPlan:
        """Return the transfer plan that follows from these offers. It's the same on all ranks."""
        machines = [offer.machine for offer in (*self.senders, *self.receivers)]
        source, target = layouts(
            [offer.shards for offer in self.senders], [offer.shards for offer in self.receivers]
        )
        return make_plan(source, target, [machines.index(name) for name in machines], self.bucket)


class Sender:
    """The sending end of a weight transfer, on a rank of the trainer."""

    def __init__(self, model: Model, device: str) -> None:
        self.trainer: Any = model.trainer
        self.device = device
        self.resharder: Resharder | None = None

    def begin(self) -> Offer | None:
        """Return this rank's offer: the weights that the trainer has here.

        Returns None if a plan can't move the weights, for example because adapters must be merged first.
        """
        pieces = self._pieces()
        return None if pieces is None else Offer(held(pieces), machine(), self.device)

    def _pieces(self) -> Mapping[str, TensorViews] | None:
        return self.trainer.pieces() if isinstance(self.trainer, ShowsPieces) else None

    def _bound_pieces(self) -> Mapping[str, TensorViews]:
        pieces = self._pieces()
        assert pieces is not None
        return pieces

    def bind(self, rank: int, offers: Offers, run: str | None) -> SharedFile | None:
        """Store the transfer plan, and set up the buffers for packed weights.

        If ``run`` is given, the buffers are in shared memory with this name, and its file is returned.
        Otherwise, they are in this process's memory, and None is returned.
        """
        pieces = self._bound_pieces()
        transport = Parcels() if run is None else Mailbox(run)
        self.resharder = Resharder(
            offers.plan(), rank, pieces, {}, cast("Transport", transport), buffers=1 if run is None else 2
        )
        self._at = storages(pieces)
        return transport.place if isinstance(transport, Mailbox) else None

    def hide(self) -> None:
        """Unlink the shared memory, so that no other process can open it.

        Call this once all receivers have opened it.
        """
        if self.resharder is not None and isinstance(self.resharder.transport, Mailbox):
            self.resharder.transport.hide()

    def pack(self, index: int, version: int, lasting: bool) -> list[Any]:
        """Pack bucket ``index``. Return a list of ``version`` and the bucket's messages, one per recipient.

        ``lasting``: whether the messages must remain valid after the next bucket is packed.
        """
        assert self.resharder is not None
        if index == 0:
            self._relocate()
        transport = self.resharder.transport
        packed = self.resharder.pack(index).values()
        if isinstance(transport, Mailbox) and not lasting:
            return [version, *(Message(version, transport.where(message)) for message in packed)]
        return [version, *(Message(version, message.numpy()) for message in packed)]

    def _relocate(self) -> None:
        """Look up the trainer's weights again, because they may have moved to other tensors."""
        assert self.resharder is not None
        pieces = self._bound_pieces()
        if (at := storages(pieces)) != self._at:
            self.resharder.relocate(pieces)
            self._at = at

    def terms(self) -> NDArray[np.int64]:
        """Return this rank's part of the digests of the weights, int64 [boxes of the plan]."""
        assert self.resharder is not None
        return self.resharder.verifier.terms().numpy()

    def close(self) -> None:
        """Free the buffers."""
        if self.resharder is not None:
            self.resharder.close()


class MasterSender(Sender):
    """The sending end for a trainer that follows this one: all weights, also those of rlflow's own heads."""

    def _pieces(self) -> Mapping[str, TensorViews] | None:
        return None if super()._pieces() is None else pieces_of(self.trainer.masters())


class Receiver:
    """The receiving end of a weight transfer, on a rank of the generator."""

    def __init__(self, model: Model, device: str) -> None:
        self.generator: Any = model.generator
        self.device, self.received = device, 0
        self.versions: dict[int, int] = {}
        self.files: list[torch.Tensor | None] = []

    def begin(self) -> bool:
        """Return whether the generator gives access to its weights' memory, as a transfer plan requires."""
        return isinstance(self.generator, ShowsDestinations)

    def offer(self, senders: list[Offer]) -> Offer:
        """Return this rank's offer: the weights that the generator needs here.

        This may overwrite the weights with test patterns, so there must be a full transfer before the
        generator samples.
        """
        self.destinations = self.generator.destinations(
            layouts([offer.shards for offer in senders], [])[0].tensors
        )
        return Offer(held(self.destinations.pieces), machine(), self.device)

    def bind(self, rank: int, offers: Offers, places: list[SharedFile | None]) -> None:
        """Store the transfer plan, and set up the buffers for received weights.

        ``places``: the shared memory of each sender, or None for a sender that has none.
        """
        self.resharder = Resharder(
            offers.plan(), rank, {}, self.destinations.pieces, cast("Transport", Parcels()), buffers=1
        )
        self.files = [None if place is None else place.opened() for place in places]

    def take(self, index: int, senders: list[int], *messages: Message) -> None:
        """Unpack the messages of bucket ``index``. ``senders``: who sent each message."""
        raw = {
            sender: self._bytes(sender, message.raw)
            for sender, message in zip(senders, messages, strict=True)
        }
        self.resharder.unpack(index, raw)
        self.versions |= {sender: message.version for sender, message in zip(senders, messages, strict=True)}
        self.received += sum(part.numel() for part in raw.values())

    def _bytes(self, sender: int, raw: NDArray[np.uint8] | tuple[int, int]) -> torch.Tensor:
        if isinstance(raw, np.ndarray):
            return viewed(raw)
        memory = self.files[sender]
        assert memory is not None
        return memory[raw[0] : raw[1]]

    def finish(self, version: int, *terms: NDArray[np.int64]) -> dict[str, float]:
        """End a transfer, and return its metrics.

        The metrics are ``inbound``, the bytes that this rank received, and ``bound``, the fewest bytes that
        any plan would have to move to it. ``terms``: the senders' parts of the digests, or nothing if digests
        aren't compared. Raises TransferError if the received weights don't match the plan or the weights that
        were sent.
        """
        received, versions, self.received, self.versions = self.received, self.versions, 0, {}
        if wrong := {sender: other for sender, other in versions.items() if other != version}:
            raise TransferError(
                f"rank {self.resharder.rank} expects weights of version {version}, but ranks sent other versions: {wrong}"
            )
        self.resharder.finish(version, received)
        if terms:
            self.resharder.verifier.compare(torch.from_numpy(np.sum(np.stack(terms), axis=0)))
        self._written(version)
        return {
            "inbound": float(received),
            "bound": float(self.resharder.plan.stats.bound[self.resharder.rank]),
        }

    def _written(self, version: int) -> None:
        """Let the generator use the received weights."""
        with self.generator.writing(version):
            self.destinations.finish(self.generator.load)

    def close(self) -> None:
        """Close the senders' shared memory."""
        self.files = []


class FollowingReceiver(Receiver):
    """The receiving end on a rank of a trainer that follows another: it needs its part of the weights twice."""

    def __init__(self, model: Model, device: str, mix: float) -> None:
        super().__init__(model, device)
        self.trainer: Any = model.trainer
        self.mix = mix

    def begin(self) -> bool:
        """Return True: the weights of a trainer that follows another are always in its own memory."""
        return True

    def offer(self, senders: list[Offer]) -> Offer:
        """Return this rank's offer: the weights of the other trainer that it needs here."""
        parts = {name: empty_like(views) for name, views in pieces_of(self.trainer.masters()).items()}
        self.destinations = Destinations(parts, {}, {})
        return Offer(held(parts), machine(), self.device)

    def _written(self, version: int) -> None:
        """Move the trainer's weights towards the received ones."""
        for name, views in pieces_of(self.trainer.masters()).items():
            for piece, other in zip(views.pieces, self.destinations.pieces[name].pieces, strict=True):
                move(piece.view, other.view, self.mix)


End = Sender | Receiver


def end_of(models: Mapping[str, Model], what: What, device: str) -> End:
    """Create this rank's end of a transfer. ``models``: the models of this rank, by role.

    A rank that has the trainer of the weights sends them, any other receives them.
    """
    if isinstance(what, Following):
        other = models[what.other]
        return (
            MasterSender(other, device)
            if other.trainer is not None
            else FollowingReceiver(models[what.role], device, what.mix)
        )
    model = models[what]
    return Sender(model, device) if model.trainer is not None else Receiver(model, device)
