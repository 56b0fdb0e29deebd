"""Planned weight transfer between two pools: the driver's side.

Weights are sent in buckets. For each one, the driver tells the ranks which weights to pack and unpack, but it
never handles weights itself: a message is the result of a call to a sender and an argument of a call to a
receiver. Messages are in Ray's object store, or in shared memory if all ranks are on one machine. At most two
buckets are in progress at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.weights.endpoints import Offer, Offers, What
from rlflow.cluster.weights.same_ranks import How
from rlflow.processes.deadline import Deadline
from rlflow.training.weight_sync.planner import BUCKET
from rlflow.training.weight_sync.segment import check_machines
from rlflow.training.weight_sync.transfer_plan import TransferPlan, firsts

if TYPE_CHECKING:
    from rlflow.cluster.worker import Worker


@dataclass(frozen=True)
class PackedBucket:
    """A bucket of weights that the senders are packing."""

    done: Mapping[int, Any]  # sender → reference that is ready once the sender has packed
    messages: Mapping[tuple[int, int], Any]  # (sender, first receiver) → reference of the message


@dataclass(frozen=True)
class TransferResult:
    """All packed buckets of a transfer."""

    buckets: tuple[PackedBucket, ...]
    # references to the senders' parts of the digests, or () if digests aren't compared
    terms: tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """The transfer plan between two pools, with its transport."""

    plan: TransferPlan
    senders: int  # number of sending ranks; receivers are numbered after them
    transport: Literal["segment", "store"]  # shared memory, or Ray's object store

    @cached_property
    def recipients(self) -> list[dict[int, dict[int, list[int]]]]:
        """For each bucket: sender → first receiver of a message → all receivers of that message."""
        return [
            {sender: _recipients(self.plan, index, sender) for sender in range(self.senders)}
            for index in range(len(self.plan.buckets))
        ]

    def incoming(self, index: int) -> dict[int, list[tuple[int, int]]]:
        """Return the messages in bucket ``index`` for each receiver, as (sender, first receiver)."""
        by_receiver: dict[int, list[tuple[int, int]]] = {}
        for sender, recipients in self.recipients[index].items():
            for first, receivers in recipients.items():
                for receiver in receivers:
                    by_receiver.setdefault(receiver, []).append((sender, first))
        return by_receiver


def _recipients(plan: TransferPlan, index: int, sender: int) -> dict[int, list[int]]:
    receivers: dict[int, list[int]] = {}
    for peer, first in firsts(plan.sends(index, sender)).items():
        receivers.setdefault(first, []).append(peer)
    return receivers


@dataclass
class WeightTransfer:
    """Transfers one role's weights from the trainer's pool to the generator's pool.

    Or, for a role that follows another: from the other's trainer to its own.
    """

    role: What
    source: Pool[Worker]  # pool of the trainer
    target: Pool[Worker]  # pool of the generator, or of the trainer that follows
    how: How = "auto"  # the option --weights
    verify_every: int = 0  # compare digests at every n-th transfer, or never if 0
    bucket: int = BUCKET  # bytes of a bucket
    route: Route | None = None  # None if a plan can't move the weights
    bound: bool = False  # whether the ranks have been asked which weights they have
    packed: int = 0  # transfers so far
    received: int = 0  # bytes that all receivers got
    run: str = field(default_factory=lambda: f"between-{secrets.token_hex(4)}")  # name of the shared memory

    # -- the plan
    # --------------------------------------------------------------------------------------------------------

    def bind(self, seconds: float) -> bool:
        """Ask all ranks which weights they have or need. Return whether a plan can move these weights.

        If so, the plan is stored in this object. After this, the generator must not sample until a transfer
        has ended. Raises PlanError if the ranks can't use the requested transport.
        """
        self.unbind()
        offers = self._all(self.source, "begin", seconds=seconds)
        if None not in offers and all(self._all(self.target, "begin", seconds=seconds)):
            all_offers = Offers(
                offers,
                self._all(self.target, "offer", self.target.transport.keep(offers), seconds=seconds),
                self.bucket,
            )
            route = Route(
                all_offers.plan(),
                len(all_offers.senders),
                self._transport([*all_offers.senders, *all_offers.receivers]),
            )
            self._open(route, self.source.transport.keep(all_offers), seconds)
            self.route = route
        self.bound = True
        return self.route is not None

    def _transport(self, offers: Sequence[Offer]) -> Literal["segment", "store"]:
        machines = {offer.machine for offer in offers}
        if self.how == "segment":
            check_machines(machines)
        here = self.how == "auto" and len(machines) == 1 and all(offer.device == "cpu" for offer in offers)
        return "segment" if here or self.how == "segment" else "store"

    def _open(self, route: Route, offers: Any, seconds: float) -> None:
        run = self.run if route.transport == "segment" else None
        places = self._each(self.source, "bind", lambda rank: (rank, offers, run), seconds)
        self._each(self.target, "bind", lambda rank: (route.senders + rank, offers, places), seconds)
        self._all(self.source, "hide", seconds=seconds)

    @property
    def bound_route(self) -> Route:
        """The plan and its transport. Available only after ``bind`` has returned True."""
        assert self.route is not None
        return self.route

    def unbind(self) -> None:
        """Drop the plan, because workers may have been replaced."""
        self.bound, self.route = False, None

    # -- transfers
    # --------------------------------------------------------------------------------------------------------

    def freeze(self, version: int) -> TransferResult:
        """Start packing all weights, and return the packed weights for a later ``deliver``.

        Workers pack them before they run any later call, so later updates don't affect them.
        """
        return TransferResult(
            tuple(self._pack(index, version, True) for index in range(len(self.bound_route.plan.buckets))),
            self._terms(),
        )

    def deliver(self, version: int, frozen: TransferResult, seconds: float) -> dict[str, Any]:
        """Move the weights packed by ``freeze`` to the generator, and return metrics of the transfer."""
        metrics = self._move(version, lambda index: frozen.buckets[index], frozen.terms, seconds)
        return metrics | self._how("frozen")

    def move(self, version: int, seconds: float) -> dict[str, Any]:
        """Move the trainer's newest weights to the generator, and return metrics of the transfer."""
        metrics = self._move(version, lambda index: self._pack(index, version, False), self._terms(), seconds)
        return metrics | self._how(self.bound_route.transport)

    def _how(self, transport: str) -> dict[str, Any]:
        """Return two metrics of a transfer, ``extra`` and ``transport``.

        ``extra`` is the most bytes that the transfer needs on any rank on top of the model.
        """
        return {"extra": float(self.bound_route.plan.stats.extra(transport)), "transport": transport}

    def _move(
        self, version: int, bucket: Callable[[int], PackedBucket], terms: Sequence[Any], seconds: float
    ) -> dict[str, Any]:
        """Move all buckets, and return metrics. Each is packed while the previous one is being unpacked.

        ``bucket``: a function that takes a bucket's index and starts packing it. ``terms``: references to the
        senders' parts of the digests.
        """
        limit, count = Deadline(seconds), len(self.bound_route.plan.buckets)
        futures: list[Future[Any]] = []
        packed = bucket(0) if count else None
        for index in range(count):
            assert packed is not None
            self._future(self.source, packed.done, limit).result()
            futures.append(self._take(index, packed, limit))
            if index:
                futures[index - 1].result()
            packed = bucket(index + 1) if index + 1 < count else None
        if futures:
            futures[-1].result()
        return self._finish(version, terms, limit)

    def _pack(self, index: int, version: int, lasting: bool) -> PackedBucket:
        done: dict[int, Any] = {}
        messages: dict[tuple[int, int], Any] = {}
        for sender, recipients in self.bound_route.recipients[index].items():
            if recipients:
                done[sender], *references = self.source.send(
                    sender,
                    "passing",
                    self.role,
                    "pack",
                    index,
                    version,
                    lasting,
                    group="model",
                    answers=1 + len(recipients),
                )
                messages |= {(sender, first): ref for first, ref in zip(recipients, references, strict=True)}
        return PackedBucket(done, messages)

    def _take(self, index: int, coming: PackedBucket, limit: Deadline) -> Future[Any]:
        refs = {}
        for receiver, pairs in self.bound_route.incoming(index).items():
            senders, messages = (
                [sender for sender, _ in pairs],
                [coming.messages[pair] for pair in pairs],
            )
            rank = receiver - self.bound_route.senders
            refs[rank] = self.target.send(
                rank, "passing", self.role, "take", index, senders, *messages, group="model"
            )
        return self._future(self.target, refs, limit)

    def _terms(self) -> tuple[Any, ...]:
        self.packed += 1
        if not self.verify_every or self.packed % self.verify_every:
            return ()
        return tuple(
            self.source.send(rank, "passing", self.role, "terms", group="model")
            for rank in range(len(self.source))
        )

    def _finish(self, version: int, terms: Sequence[Any], limit: Deadline) -> dict[str, Any]:
        references = {
            rank: self.target.send(rank, "passing", self.role, "finish", version, *terms, group="model")
            for rank in range(len(self.target))
        }
        ranks = self._future(self.target, references, limit).result()
        self.received += int(sum(rank["inbound"] for rank in ranks))
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    # -- calls
    # --------------------------------------------------------------------------------------------------------

    def _all(self, pool: Pool[Worker], step: str, *arguments: Any, seconds: float) -> list[Any]:
        return self._each(pool, step, lambda rank: arguments, seconds)

    def _each(
        self, pool: Pool[Worker], step: str, arguments: Callable[[int], tuple[Any, ...]], seconds: float
    ) -> list[Any]:
        refs = {
            rank: pool.send(rank, "passing", self.role, step, *arguments(rank), group="model")
            for rank in range(len(pool))
        }
        answers: list[Any] = self._future(pool, refs, Deadline(seconds)).result()
        return answers

    def _future(self, pool: Pool[Worker], refs: Mapping[int, Any], limit: Deadline) -> Future[Any]:
        return pool.future("weights between pools", list(refs.items()), limit.left(), list, limit)
