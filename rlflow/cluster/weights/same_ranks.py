"""Planned weight transfer from a trainer to a generator on the same ranks, from memory to memory.

The plan is made at the first transfer, from the tensors of the trainers and generators on all ranks. All
ranks take part in each transfer. A plan can't move adapters, which must be merged first, or the weights of a
generator that doesn't give access to its memory. In these cases, weights are sent as full tensors, one after
another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from rlflow.author import torch_private
from rlflow.errors import PlanError
from rlflow.execution.role_model import Model
from rlflow.training.protocols import ShowsDestinations, ShowsPieces
from rlflow.training.weight_sync.exchange import TEXT, exchange
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.handles import Handles
from rlflow.training.weight_sync.layout import HELD, TensorShard, WeightLayout, join
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.segment import Segment, machine
from rlflow.training.weight_sync.shards import TensorViews, held
from rlflow.training.weight_sync.transfer_plan import TransferPlan
from rlflow.training.weight_sync.transport import AllToAll, Transport

How = Literal["auto", "segment", "alltoall", "gather"]


def movable(model: Model, how: How) -> bool:
    """Return whether a plan can move this model's weights. The result is the same on all ranks.

    ``how``: the value of --weights.
    """
    here = how != "gather" and dist.is_initialized() and isinstance(model.generator, ShowsDestinations)
    return here and isinstance(model.trainer, ShowsPieces) and model.trainer.pieces() is not None


class SameRankTransfer:
    """Moves one role's weights from trainer to generator on the ranks of torch's default process group.

    ``how``: the value of --weights. ``run``: a name that is the same on all ranks and unique to this run and
    role. ``verify_every``: compare digests of the weights at every n-th transfer, or never if 0.
    """

    def __init__(self, model: Model, how: How, run: str, device: str, verify_every: int) -> None:
        self.trainer: Any = model.trainer
        self.generator: Any = model.generator
        self.how, self.run, self.device, self.verify_every = how, run, device, verify_every
        self._bind()

    def _bind(self) -> None:
        pieces: dict[str, TensorViews] = self.trainer.pieces()
        source = _joined(pieces)
        self.destinations = self.generator.destinations(source.tensors)
        target = _joined(self.destinations.pieces)
        nodes = _nodes()
        self.resharder = self._resharder(make_plan(source, target, nodes), pieces, len(set(nodes)) == 1)
        self._at = storages(pieces)

    def _resharder(
        self, plan: TransferPlan, pieces: Mapping[str, TensorViews], one_machine: bool
    ) -> Resharder:
        def bind_with(way: str) -> Resharder:
            transports: dict[str, Callable[[], Transport]] = {
                "segment": partial(Segment, self.run),
                "handles": partial(Handles, self.device),
                "alltoall": partial(AllToAll, None, self.device),
            }
            return Resharder(
                plan,
                dist.get_rank(),
                pieces,
                self.destinations.pieces,
                transports[way](),
                verify_every=self.verify_every,
            )

        return first_that_opens(bind_with, ways(self.how, self.device, one_machine))

    def __call__(self, version: int) -> dict[str, Any]:
        """Move this version of the trainer's weights to the generator, and return metrics.

        The metrics are ``inbound``, the bytes received from other ranks; ``bound``, the fewest bytes that
        any plan would have to move; ``extra``, the most bytes that the transfer needs on any rank on
        top of the model; and ``transport``, the name of the transport. Raises TransferError if the weights
        don't match the plan.
        """
        # the weights are in other tensors now; the result is the same on all ranks
        if storages(self.trainer.pieces()) != self._at:
            self.resharder.close()
            self._bind()
        with self.generator.writing(version):
            self.resharder.run(version)
            self.destinations.finish(self.generator.load)
        stats, rank = self.resharder.plan.stats, self.resharder.rank
        transport = self.resharder.transport.name
        return {
            "inbound": float(stats.inbound[rank]),
            "bound": float(stats.bound[rank]),
            "extra": float(stats.extra(transport)),
            "transport": transport,
        }

    def close(self) -> None:
        """Free the buffers."""
        self.resharder.close()


def ways(how: How, device: str, one_machine: bool) -> tuple[str, ...]:
    """Return the names of the transports to try between the ranks of a pool, in order of preference.

    On one machine, shared memory comes first: GPU memory if the weights are on GPUs, otherwise host memory.
    """
    if how == "segment":
        return ("segment",) if device == "cpu" else ("handles",)
    if how == "alltoall" or not one_machine:
        return ("alltoall",)
    return ("segment",) if device == "cpu" else ("handles", "alltoall")


def first_that_opens(bind_with: Callable[[str], Resharder], ways: tuple[str, ...]) -> Resharder:
    """Call ``bind_with`` for one transport after another until one works, and return its result.

    Raises PlanError if none works. A transport fails, for example, if processes can't share their GPUs'
    memory. A failure is noticed by all ranks together.
    """
    *choices, last = ways
    for way in choices:
        try:
            return bind_with(way)
        except PlanError as error:
            if any(problem.code != "reshard-handles" for problem in error.problems):
                raise
    return bind_with(last)


def _joined(pieces: Mapping[str, TensorViews]) -> WeightLayout:
    """Return the layout of the tensors over all ranks, given each rank's own pieces."""
    by_rank: list[dict[str, TensorShard]] = exchange(held(pieces), HELD)
    return join(by_rank)


def _nodes() -> list[int]:
    """Return a number for each rank that identifies its machine."""
    names = exchange(machine(), TEXT)
    return [names.index(name) for name in names]


def storages(pieces: Mapping[str, TensorViews]) -> list[int]:
    """Return the identities of the storages of all pieces.

    A storage keeps its identity when weights are offloaded and come back at a different address. Addresses
    themselves won't do, because they may change on one rank only.
    """
    return [torch_private.storage_key(piece.view) for views in pieces.values() for piece in views.pieces]
