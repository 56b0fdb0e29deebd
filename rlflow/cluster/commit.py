"""Commits: in-memory checkpoints from which a run recovers after the death of a worker.

A commit has copies of the state of all roles that the run may change, and of rows that were sampled ahead.
The copies are stored outside the workers. A copy of a trainer's state is the answer to a call; the driver
owns the answer but never opens it, and on Ray it is in the object store. Workers get it back as the argument
of a call. Rows are small, so the driver keeps them in packed form.
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

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.cluster.health.monitor import Death

READ_SECONDS = 600.0  # time limit to read a copy from its store
FOUND_SECONDS = 30.0  # how long a failed call waits for the health monitor to report which worker died


@dataclass(frozen=True)
class Copy:
    """A copy of a trainer's state."""

    ref: Any  # reference to the copy
    size: Future[int]  # number of bytes, once the copy is complete

    @staticmethod
    def of(trainer: RemoteTrainer) -> Copy:
        """Start to copy a trainer's state."""
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
        """Wait up to ``seconds`` for the copies. Return whether all copies are complete."""
        wait([copy.size for copy in self.states.values()], seconds)
        return self.complete

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` each time a copy completes, in a thread of the transport.

        The copies hold no reference to this commit, so it can be freed before they complete.
        """
        for copy in self.states.values():
            copy.size.add_done_callback(lambda _: action())

    @property
    def complete(self) -> bool:
        """Whether all copies are outside the workers."""
        return all(copy.size.done() and copy.size.exception() is None for copy in self.states.values())


class ProcessWorkers(Protocol):
    """All workers of a run, with the methods that recovery needs."""

    def found(self, seconds: float) -> Death | None:
        """Wait up to ``seconds`` until the health monitor finds a dead worker; None if it finds none."""

    def lost(self) -> str | None:
        """Describe the dead process without which no worker can be started; None if all are alive."""

    def unwatch(self) -> None:
        """Stop checking for dead workers. Calls that still wait for an answer raise Dead."""

    def restart(self, lost: str) -> list[str]:
        """Start a pool again. Return the names of all pools that were started again."""


@dataclass
class Workers:
    """Recovers the workers of a run.

    It makes commits, finds dead workers, starts their pools again, and restores all pools to a commit.
    """

    run_workers: ProcessWorkers
    engine: ClusterEngine
    roles: tuple[str, ...]  # roles that the run may change
    ahead: Ahead | None = None  # the queue of rows sampled ahead

    def commit(self, iteration: int) -> Commit:
        """Start a commit before an iteration, and return it.

        Later calls to the workers' models wait until the copies are made.

        Waits for rows that are being sampled, and raises the error if sampling fails.
        """
        trainers = {role: self.engine.models[role].trainer for role in self.roles}
        states = {role: Copy.of(trainer) for role, trainer in trainers.items() if trainer}
        for copy in states.values():
            copy.size.add_done_callback(self._count)
        versions = {role: model.version for role, model in self.engine.models.items()}
        return Commit(states, versions, self.ahead.saved(iteration) if self.ahead else None)

    def _count(self, size: Future[int]) -> None:
        if size.exception() is None:
            self.engine.committed(size.result())

    def death(self, error: BaseException) -> Death | None:
        """Return the death of a worker that caused an error.

        Returns None if no worker died, or if some processes of its pool could not be ended.
        """
        causes = list(chain(error))
        if not any(isinstance(cause, RemoteError) for cause in causes):
            return None
        death = self.run_workers.found(
            FOUND_SECONDS if any(isinstance(cause, Dead) for cause in causes) else 0.0
        )
        return death if death is not None and death.pool_ended else None

    def lost(self) -> str | None:
        """Describe the controlling process of Ray that has died; None if all are alive."""
        return self.run_workers.lost()

    def restart(self, death: Death) -> list[str]:
        """Start the pool of a dead worker again. Return the names of all pools that were started again."""
        if self.ahead is not None:
            self.ahead.drop()
        return self.run_workers.restart(death.pool)

    def copied(self, commit: Commit) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (role, state of its trainer) from a complete commit, without using any worker.

        Raises RemoteError if a copy is lost.
        """
        for role, copy in commit.states.items():
            trainer = self.engine.models[role].trainer
            assert trainer is not None
            try:
                yield role, unpack_tensors(trainer.pool.transport.future(copy.ref).result(READ_SECONDS))
            except Exception as error:  # one of Ray's many errors, or an error of the worker
                raise RemoteError(f"the copy of the state of '{role}' cannot be read: {error}") from error

    def restore(self, commit: Commit) -> None:
        """Restore all pools to a commit. The stream of prompts returns to its position at the commit."""
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
    """Return an error and all its causes."""
    return [error, *chain(error.__cause__ or error.__context__)] if error is not None else []
