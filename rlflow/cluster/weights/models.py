"""What stands on the driver for a model on pools: its version, and its weights on their way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.tensors import pack_tensors, unpack_tensors
from rlflow.cluster.weights.transfer import Carrier, TransferResult
from rlflow.cluster.worker import Worker

MOVE_SECONDS = 1800.0  # how long weights or state may take from pool to pool


@dataclass(frozen=True)
class Frozen:
    """Weights on their way: how many updates are behind them, and what they are: parcels of a plan, or a reference of whole tensors."""

    version: int
    weights: Any


@dataclass
class RemoteTrainer:
    """A role's trainer, one per rank of a pool. Rank 0 speaks for all; where ranks hold a part of the weights each (``collective``), the
    others take part in what it says."""

    role: str
    pool: Pool[Worker]
    collective: bool = False

    def begin(self, method: str, *args: Any, answers: int = 1) -> Any:
        """Start a method of the workers' about this role; the reference of what rank 0 answers, or of each of its several."""
        ranks = range(len(self.pool)) if self.collective else (0,)
        return [self.pool.send(rank, method, self.role, *args, group="model", answers=answers) for rank in ranks][0]

    def _asked(self, method: str, *args: Any) -> Any:
        return self.pool.future(method, [(0, self.begin(method, *args))], MOVE_SECONDS, lambda answers: answers[0]).result()

    def state(self) -> dict[str, Tensor]:
        """Copies: nothing here changes when the workers go on."""
        return unpack_tensors(self._asked("state"))

    def restore(self, state: dict[str, Tensor]) -> None:
        self.pool.call(Worker.restore, self.role, ray.put(pack_tensors(state)), seconds=MOVE_SECONDS, group="model").result()

    def save(self, folder: Path) -> None:
        self._asked("save", str(folder.resolve()))


@dataclass
class RemoteModel:
    """A role: where its halves are, how many updates are behind its weights, and how many behind those that sample. moved: of the last time
    that weights went from one half to the other by a plan: the most bytes that a rank received, and had to, and how. carrier: between
    two pools."""

    role: str
    trainer: RemoteTrainer | None = None
    generator: Pool[Worker] | None = None
    version: int = 0
    sampled_version: int = 0
    moved: dict[str, Any] = field(default_factory=dict)
    carrier: Carrier | None = None

    def __post_init__(self) -> None:
        self._receiving = threading.Lock()  # a generator takes one set of weights at a time

    def frozen(self) -> Frozen | None:
        """The weights as they are now; None where the generator's pool is the trainer's, which has just the newest. Whoever asks for the
        first time does so while nothing is sampled."""
        if self.trainer is None or self._together:
            return None
        if self._planned(MOVE_SECONDS):
            assert self.carrier is not None
            return Frozen(self.version, self.carrier.freeze(self.version))
        return Frozen(self.version, self.trainer.begin("weights"))

    @property
    def _together(self) -> bool:
        return self.trainer is None or self.generator is None or self.generator is self.trainer.pool

    def _planned(self, seconds: float) -> bool:
        """Whether weights go by a plan to the other pool, which is made now where it is not there yet."""
        if self.carrier is None:
            return False
        if not self.carrier.bound and self.carrier.bind(seconds):
            self.sampled_version = -1
        return self.carrier.route is not None

    def use(self, frozen: Frozen, seconds: float) -> None:
        """Let the generator sample with these weights."""
        with self._receiving:
            if self.generator is None or self.sampled_version == frozen.version:
                return
            self.sampled_version = -1  # of a transfer that fails, nobody knows how far it came
            if isinstance(frozen.weights, TransferResult):
                assert self.carrier is not None
                self.moved = self.carrier.deliver(frozen.version, frozen.weights, seconds)
            else:
                self.generator.call("receive", self.role, frozen.version, frozen.weights, seconds=seconds, group="model").result()
            self.sampled_version = frozen.version

    def synchronise(self, seconds: float = MOVE_SECONDS) -> None:
        """Hand the trainer's weights to the generator where they are newer: on one pool each rank has both."""
        if self.generator is None or self.trainer is None or self.sampled_version == self.version:
            return
        if self._together:
            ranks = self.generator.call(Worker.synchronise, self.role, self.version, seconds=seconds, group="model").result()
            self.moved = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
            self.sampled_version = self.version
        elif self._planned(seconds):
            self._move(seconds)
        else:
            self.use(Frozen(self.version, self.trainer.begin("weights")), seconds)

    def _move(self, seconds: float) -> None:
        assert self.carrier is not None
        with self._receiving:
            self.sampled_version = -1
            self.moved = self.carrier.move(self.version, seconds)
            self.sampled_version = self.version

    def restored(self, version: int) -> None:
        """Put back to weights with so many updates behind them; workers may be others."""
        self.version, self.sampled_version = version, -1
        if self.carrier is not None:
            self.carrier.unbind()
