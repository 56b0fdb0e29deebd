"""The driver's handle of a model on pools: its trainer, generator, versions, and weight transfers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.rpc.wire_tensors import pack_tensors, unpack_tensors
from rlflow.cluster.weights.transfer import TransferResult, WeightTransfer
from rlflow.cluster.worker import Worker

MOVE_SECONDS = 1800.0  # time limit to move weights or state between pools


@dataclass(frozen=True)
class Frozen:
    """One version of the weights, copied from the trainer so that rows can be sampled with it later."""

    version: int  # number of updates that the weights have had
    weights: Any  # a TransferResult, or a reference to full tensors


@dataclass
class RemoteTrainer:
    """The driver's handle of a role's trainer on a pool. Rank 0 gives the answers."""

    role: str
    pool: Pool[Worker]
    # whether each rank has only a part of the weights, so that all ranks must take part in an answer
    collective: bool = False

    def begin(self, method: str, *args: Any, answers: int = 1) -> Any:
        """Start one of the workers' methods for this role, and return a reference to rank 0's answer.

        If ``answers`` is above 1, the method returns that many values, and you get a list of references.
        """
        ranks = range(len(self.pool)) if self.collective else (0,)
        sent = [
            self.pool.send(rank, method, self.role, *args, group="model", answers=answers) for rank in ranks
        ]
        return sent[0]

    def _answer(self, method: str, *args: Any) -> Any:
        return self.pool.future(
            method, [(0, self.begin(method, *args))], MOVE_SECONDS, lambda answers: answers[0]
        ).result()

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the trainer's state as name → tensor."""
        return unpack_tensors(self._answer("state"))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the trainer to a state returned by ``state``."""
        kept = self.pool.transport.keep(pack_tensors(state))
        self.pool.call(Worker.restore, self.role, kept, seconds=MOVE_SECONDS, group="model").result()

    def resize_passes(self, tokens: int) -> int:
        """Set the maximum number of tokens per forward pass on each rank, and return the previous maximum."""
        return self.pool.call(
            Worker.resize_passes, self.role, tokens, seconds=MOVE_SECONDS, group="model"
        ).result()[0]

    def save(self, folder: Path) -> None:
        """Save the trainer's model as a Hugging Face folder."""
        self._answer("save", str(folder.resolve()))


@dataclass
class RemoteModel:
    """The driver's handle of a model whose trainer and generator are on pools."""

    role: str
    trainer: RemoteTrainer | None = None
    generator: Pool[Worker] | None = None  # the pool of the generator
    version: int = 0  # updates in the trainer's weights
    sampled_version: int = 0  # updates in the generator's weights; -1 if unknown
    moved: dict[str, Any] = field(default_factory=dict)  # metrics of the last weight transfer
    transfer: WeightTransfer | None = None  # the planned transfer between two pools
    following: WeightTransfer | None = None  # the planned transfer from the trainer that this one follows
    received: int = 0  # bytes of weights that ranks of the generator received without ``transfer``

    def __post_init__(self) -> None:
        self._receiving = threading.Lock()  # a generator receives one set of weights at a time

    def frozen(self) -> Frozen | None:
        """Copy the trainer's current weights, for sampling with them later.

        Returns None if trainer and generator are on the same pool, because then the generator can only use
        the newest weights. The first call must be made while nothing is being sampled.
        """
        if self.trainer is None or self._together:
            return None
        if self._planned(MOVE_SECONDS):
            assert self.transfer is not None
            return Frozen(self.version, self.transfer.freeze(self.version))
        return Frozen(self.version, self.trainer.begin("weights"))

    @property
    def _together(self) -> bool:
        return self.trainer is None or self.generator is None or self.generator is self.trainer.pool

    def _planned(self, seconds: float) -> bool:
        """Return whether a plan moves the weights between the two pools, making the plan if needed."""
        if self.transfer is None:
            return False
        if not self.transfer.bound and self.transfer.bind(seconds):
            self.sampled_version = -1
        return self.transfer.route is not None

    def use(self, frozen: Frozen, seconds: float) -> None:
        """Move the weights in ``frozen`` to the generator within ``seconds``."""
        with self._receiving:
            if self.generator is None or self.sampled_version == frozen.version:
                return
            self.sampled_version = -1  # unknown until the transfer has ended
            if isinstance(frozen.weights, TransferResult):
                assert self.transfer is not None
                self.moved = self.transfer.deliver(frozen.version, frozen.weights, seconds)
            else:
                sizes: Future[list[int]] = self.generator.call(
                    "receive", self.role, frozen.version, frozen.weights, seconds=seconds, group="model"
                )
                self.received += sum(sizes.result())
            self.sampled_version = frozen.version

    def synchronise(self, seconds: float = MOVE_SECONDS) -> None:
        """If the trainer's weights are newer than the generator's, move them to the generator."""
        if self.generator is None or self.trainer is None or self.sampled_version == self.version:
            return
        if self._together:
            ranks = self.generator.call(
                Worker.synchronise, self.role, self.version, seconds=seconds, group="model"
            ).result()
            self.moved = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
            self.received += int(sum(rank.get("inbound", 0) for rank in ranks))
            self.sampled_version = self.version
        elif self._planned(seconds):
            self._move(seconds)
        else:
            self.use(Frozen(self.version, self.trainer.begin("weights")), seconds)

    def follow(self, other: RemoteModel, mix: float, seconds: float) -> None:
        """Move the trainer's weights towards those of a model whose trainer is on another pool."""
        assert self.trainer is not None
        assert other.trainer is not None
        plan = self.following
        if plan is not None and (plan.route is not None or (not plan.bound and plan.bind(seconds))):
            plan.move(other.version, seconds)
            return
        sizes: Future[list[int]] = self.trainer.pool.call(
            "follow_masters", self.role, other.trainer.begin("masters"), mix, seconds=seconds, group="model"
        )
        self.received += sum(sizes.result())

    def arrived(self) -> int:
        """Return how many bytes of weights the model's ranks have received since the last call."""
        size, self.received = self.received, 0
        for transfer in self._transfers:
            size, transfer.received = size + transfer.received, 0
        return size

    @property
    def _transfers(self) -> list[WeightTransfer]:
        return [transfer for transfer in (self.transfer, self.following) if transfer is not None]

    def _move(self, seconds: float) -> None:
        assert self.transfer is not None
        with self._receiving:
            self.sampled_version = -1
            self.moved = self.transfer.move(self.version, seconds)
            self.sampled_version = self.version

    def restored(self, version: int) -> None:
        """Note that the trainer was restored to this version of the weights.

        The transfer plan is dropped, because workers may have been replaced.
        """
        self.version, self.sampled_version = version, -1
        for transfer in self._transfers:
            transfer.unbind()
