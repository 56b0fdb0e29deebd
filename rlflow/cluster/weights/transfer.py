"""Weights from the ranks of one pool to those of another, by a plan, as the driver has it carried out.

The driver says which rank packs and which takes what, bucket by bucket, and never sees a weight: messages are results of one worker's call
and arguments of another's, in Ray's object store, or lie in shared memory where all are on one machine. At most two buckets are on
their way at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import ray

from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.weights.endpoints import Offer, Offers
from rlflow.cluster.weights.same_ranks import How
from rlflow.deadline import Deadline
from rlflow.reshard.plan import TransferPlan, firsts
from rlflow.reshard.planner import BUCKET
from rlflow.reshard.segment import check_machines

if TYPE_CHECKING:
    from rlflow.cluster.worker import Worker


@dataclass(frozen=True)
class Packed:
    """A bucket on its way: of each sender that it is packed, and of each message (sender, first receiver) a reference."""

    done: Mapping[int, Any]
    messages: Mapping[tuple[int, int], Any]


@dataclass(frozen=True)
class TransferResult:
    """All that a transfer brings. terms: what senders say of its digests, where these are to be compared."""

    buckets: tuple[Packed, ...]
    terms: tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """A plan between two pools, and how it is carried out."""

    plan: TransferPlan
    senders: int
    transport: Literal["segment", "store"]

    @cached_property
    def letters(self) -> list[dict[int, dict[int, list[int]]]]:
        """Of each bucket and sender: the first receiver of each message, and all that get it."""
        return [{sender: _letters(self.plan, index, sender) for sender in range(self.senders)} for index in range(len(self.plan.buckets))]

    def addressed(self, index: int) -> dict[int, list[tuple[int, int]]]:
        """What each receiver takes of a bucket: (sender, first receiver)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for sender, letters in self.letters[index].items():
            for first, receivers in letters.items():
                for receiver in receivers:
                    found.setdefault(receiver, []).append((sender, first))
        return found


def _letters(plan: TransferPlan, index: int, sender: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for peer, first in firsts(plan.sends(index, sender)).items():
        found.setdefault(first, []).append(peer)
    return found


@dataclass
class Carrier:
    """One role's weights. verify_every: transfers between comparisons of digests (0: never). bucket: bytes."""

    role: str
    source: Pool[Worker]
    target: Pool[Worker]
    how: How = "auto"
    verify_every: int = 0
    bucket: int = BUCKET
    route: Route | None = None
    bound: bool = False
    packed: int = 0  # transfers, ever
    run: str = field(default_factory=lambda: f"between-{secrets.token_hex(4)}")

    # -- who holds and needs what ------------------------------------------------------------------------------------------------

    def bind(self, seconds: float) -> bool:
        """Ask all ranks what they hold and need, and make the plan; whether there is one. The generator's weights are patterns then, until
        a transfer is through. Raises PlanError where these ranks cannot use what was asked for."""
        self.unbind()
        offers = self._all(self.source, "begin", seconds=seconds)
        if None not in offers and all(self._all(self.target, "begin", seconds=seconds)):
            made = Offers(offers, self._all(self.target, "offer", ray.put(offers), seconds=seconds), self.bucket)
            route = Route(made.plan(), len(made.senders), self._transport([*made.senders, *made.receivers]))
            self._open(route, ray.put(made), seconds)
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

    def unbind(self) -> None:
        """Workers are others, or may be."""
        self.bound, self.route = False, None

    # -- transfers ---------------------------------------------------------------------------------------------------------------

    def freeze(self, version: int) -> TransferResult:
        """Begin to pack all that a transfer brings, before anything that these workers are asked from now on: it stays as it is."""
        assert self.route is not None
        return TransferResult(tuple(self._pack(index, version, True) for index in range(len(self.route.plan.buckets))), self._terms())

    def deliver(self, version: int, parcels: TransferResult, seconds: float) -> dict[str, Any]:
        """Bring the generator to weights that were packed before; what moved."""
        told = self._move(version, lambda index: parcels.buckets[index], parcels.terms, seconds)
        return told | self._how("frozen")

    def move(self, version: int, seconds: float) -> dict[str, Any]:
        """Bring the generator to the trainer's weights; what moved."""
        assert self.route is not None
        told = self._move(version, lambda index: self._pack(index, version, False), self._terms(), seconds)
        return told | self._how(self.route.transport)

    def _how(self, transport: str) -> dict[str, Any]:
        """The most bytes that a transfer takes on any rank beside the model, and by what it goes."""
        assert self.route is not None
        return {"extra": float(self.route.plan.stats.extra(transport)), "transport": transport}

    def _move(self, version: int, bucket: Callable[[int], Packed], terms: Sequence[Any], seconds: float) -> dict[str, Any]:
        """A bucket is packed while the one before it is taken."""
        assert self.route is not None
        limit, count = Deadline(seconds), len(self.route.plan.buckets)
        taken: list[Future[Any]] = []
        coming = bucket(0) if count else None
        for index in range(count):
            assert coming is not None
            self._future(self.source, coming.done, limit).result()
            taken.append(self._take(index, coming, limit))
            if index:
                taken[index - 1].result()
            coming = bucket(index + 1) if index + 1 < count else None
        if taken:
            taken[-1].result()
        return self._finish(version, terms, limit)

    def _pack(self, index: int, version: int, kept: bool) -> Packed:
        assert self.route is not None
        done: dict[int, Any] = {}
        messages: dict[tuple[int, int], Any] = {}
        for sender, letters in self.route.letters[index].items():
            if letters:
                done[sender], *made = self.source.send(sender, "passing", self.role, "pack", index, version, kept, group="model",
                                                       answers=1 + len(letters))
                messages |= {(sender, first): ref for first, ref in zip(letters, made, strict=True)}
        return Packed(done, messages)

    def _take(self, index: int, coming: Packed, limit: Deadline) -> Future[Any]:
        assert self.route is not None
        refs = {}
        for receiver, letters in self.route.addressed(index).items():
            senders, messages = [sender for sender, _ in letters], [coming.messages[letter] for letter in letters]
            rank = receiver - self.route.senders
            refs[rank] = self.target.send(rank, "passing", self.role, "take", index, senders, *messages, group="model")
        return self._future(self.target, refs, limit)

    def _terms(self) -> tuple[Any, ...]:
        self.packed += 1
        if not self.verify_every or self.packed % self.verify_every:
            return ()
        return tuple(self.source.send(rank, "passing", self.role, "terms", group="model") for rank in range(len(self.source)))

    def _finish(self, version: int, terms: Sequence[Any], limit: Deadline) -> dict[str, Any]:
        told = {rank: self.target.send(rank, "passing", self.role, "finish", version, *terms, group="model")
                for rank in range(len(self.target))}  # fmt: skip
        ranks = self._future(self.target, told, limit).result()
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def _all(self, pool: Pool[Worker], step: str, *told: Any, seconds: float) -> list[Any]:
        return self._each(pool, step, lambda rank: told, seconds)

    def _each(self, pool: Pool[Worker], step: str, told: Callable[[int], tuple[Any, ...]], seconds: float) -> list[Any]:
        refs = {rank: pool.send(rank, "passing", self.role, step, *told(rank), group="model") for rank in range(len(pool))}
        answers: list[Any] = self._future(pool, refs, Deadline(seconds)).result()
        return answers

    def _future(self, pool: Pool[Worker], refs: Mapping[int, Any], limit: Deadline) -> Future[Any]:
        return pool.future("weights between pools", list(refs.items()), limit.left(), list, limit)
