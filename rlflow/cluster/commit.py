"""Commits: in-memory checkpoints from which a run recovers when a worker has died.

A commit contains a copy of the state of every role that the run may change, and the rows sampled ahead. The
copies live outside the workers. On Ray, a trainer's state is in Ray's object store, as the result of a call
to one worker that later becomes the argument of a call to another. The driver never reads it. The driver
keeps the rows in packed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.cluster.cluster_engine import ClusterEngine
from rlflow.cluster.rpc.wire_tensors import unpack_tensors
from rlflow.cluster.weights.sharded_models import MOVE_SECONDS, RemoteTrainer
from rlflow.errors import Dead, RemoteError
from rlflow.execution.lookahead import Ahead
from rlflow.execution.memory.saved import pack

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.cluster.health.monitor import Death

READ_SECONDS = 600.0  # time limit to read a copy from its store
FOUND_SECONDS = 30.0  # how long a failed call waits for the health monitor to report which worker died


@dataclass(frozen=True)
class Copy:
    """A copy of a trainer's state, stored outside the worker."""

    ref: Any  # reference to the copy
    size: Future[int]  # number of bytes, once the copy is complete

    @staticmethod
    def of(trainer: RemoteTrainer) -> Copy:
        """Start copying a trainer's state, and return the copy, which completes later."""
        ref, size = trainer.begin("commit", answers=2)
        return Copy(ref, trainer.pool.transport.future(size))


@dataclass(frozen=True)
class Commit:
    """The state of a run's models before an iteration."""

    states: Mapping[str, Copy]  # role that the run may change → copy of its state
    versions: Mapping[str, int]  # role → updates before the commit
    # rows sampled ahead: (JSON state, packed rows by file)
    queue: tuple[Mapping[str, Any], Mapping[str, bytes]] | None

    def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all copies to complete, and return whether they have."""
        wait([copy.size for copy in self.states.values()], seconds)
        return self.complete

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` once per copy, when that copy completes or fails.

        The call is made in one of the transport's threads. The copies hold no reference to this commit.
        """
        for copy in self.states.values():
            copy.size.add_done_callback(lambda _: action())

    @property
    def complete(self) -> bool:
        """Whether all copies are complete, so that the commit survives the death of any worker."""
        return all(copy.size.done() and copy.size.exception() is None for copy in self.states.values())


class ProcessWorkers(Protocol):
    """What recovery needs from a run's workers."""

    def found(self, seconds: float) -> Death | None:
        """Wait up to ``seconds`` for a worker to die. Return its death, or None if all workers are alive."""

    def lost(self) -> str | None:
        """Describe a dead process without which no worker can be started, or return None if there is none."""

    def unwatch(self) -> None:
        """Stop the health checks. Calls still waiting for an answer raise Dead."""

    def restart(self, lost: str) -> list[str]:
        """Restart the pool ``lost``, and return the names of all pools that had to be restarted."""


@dataclass
class Workers:
    """Recovers a run's workers: makes commits, restarts dead pools, and restores commits."""

    run_workers: ProcessWorkers
    engine: ClusterEngine
    roles: tuple[str, ...]  # roles that the run may change
    ahead: Ahead | None = None  # the queue of rows sampled ahead

    def commit(self, iteration: int) -> Commit:
        """Start a commit of the state before ``iteration``, and return it.

        The copies complete later, and calls to a worker's models wait for them. If rows are being sampled
        ahead, this method first waits for them, and raises the error if sampling fails.
        """
        trainers = {role: self.engine.models[role].trainer for role in self.roles}
        states = {role: Copy.of(trainer) for role, trainer in trainers.items() if trainer}
        for copy in states.values():
            copy.size.add_done_callback(self._count)
        versions = {role: model.version for role, model in self.engine.models.items()}
        pack(self.engine.memory, self.engine)
        return Commit(states, versions, self.ahead.saved(iteration) if self.ahead else None)

    def _count(self, size: Future[int]) -> None:
        if size.exception() is None:
            self.engine.committed(size.result())

    def death(self, error: BaseException) -> Death | None:
        """Return the worker's death that caused ``error``.

        Returns None if no worker died, or if some processes of the dead worker's pool couldn't be ended.
        """
        causes = list(chain(error))
        if not any(isinstance(cause, RemoteError) for cause in causes):
            return None
        death = self.run_workers.found(
            FOUND_SECONDS if any(isinstance(cause, Dead) for cause in causes) else 0.0
        )
        return death if death is not None and death.pool_ended else None

    def lost(self) -> str | None:
        """Describe a controlling process of Ray that has died, or return None if all are alive."""
        return self.run_workers.lost()

    def restart(self, death: Death) -> list[str]:
        """Restart a dead worker's pool, and return the names of all pools that had to be restarted."""
        if self.ahead is not None:
            self.ahead.drop()
        return self.run_workers.restart(death.pool)

    def copied(self, commit: Commit) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (role, trainer state) for each role of a complete commit. This needs no worker.

        Raises RemoteError if a copy is lost.
        """
        for role, copy in commit.states.items():
            trainer = self.engine.models[role].trainer
            assert trainer is not None
            try:
                yield role, unpack_tensors(trainer.pool.transport.future(copy.ref).result(READ_SECONDS))
            except Exception as error:  # one of Ray's many errors, or an error from the worker
                raise RemoteError(f"the copy of the state of '{role}' cannot be read: {error}") from error

    def restore(self, commit: Commit) -> None:
        """Restore all models, and the rows sampled ahead, to their state at a commit."""
        for role, copy in commit.states.items():
            trainer = self.engine.models[role].trainer
            assert trainer is not None
            trainer.pool.call("restore", role, copy.ref, seconds=MOVE_SECONDS, group="model").result()
        for role, version in commit.versions.items():
            self.engine.models[role].restored(version)
        if self.ahead is not None and commit.queue is not None:
            self.ahead.restore(*commit.queue)
        self.engine.ran()  # drops time spans of iterations that will run again
        self.engine.traffic()


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an error together with all its direct and indirect causes."""
    return [error, *chain(error.__cause__ or error.__context__)] if error is not None else []
