"""Commits: copies of the state of roles that the run may change and of rows sampled ahead, kept outside of
the workers, and how a run goes back to them.

The copies of state are answers that the driver owns and never opens (on Ray, objects of its store): workers
make them as results of calls and get them back as arguments of others. Rows are few bytes, which the driver
keeps packed.
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

READ_SECONDS = 600.0  # how long a copy may take to come out of the store that holds it
FOUND_SECONDS = 30.0  # how long a failed call waits for the health monitor to say which worker died


@dataclass(frozen=True)
class Copy:
    """A copy of a trainer's state."""

    ref: Any  # the reference of the copy
    size: Future[int]  # its bytes, once it is complete

    @staticmethod
    def of(trainer: RemoteTrainer) -> Copy:
        """Begin to copy a trainer's state."""
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
        """Whether all copies are complete; waits for them for at most so many seconds."""
        wait([copy.size for copy in self.states.values()], seconds)
        return self.complete

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` as each copy is complete, in a thread of the transport. The copies hold no
        reference to this commit."""
        for copy in self.states.values():
            copy.size.add_done_callback(lambda _: action())

    @property
    def complete(self) -> bool:
        """Whether all copies are outside of the workers."""
        return all(copy.size.done() and copy.size.exception() is None for copy in self.states.values())


class WorkerFleet(Protocol):
    """All workers of a run, as far as recovery is concerned."""

    def found(self, seconds: float) -> Death | None:
        """The death of a worker, waited for at most so many seconds; None where none is known by then."""

    def lost(self) -> str | None:
        """Names the dead process without which no worker can be started; None if all are alive."""

    def unwatch(self) -> None:
        """Find no more deaths. Calls that still wait for a dead worker raise Dead."""

    def restart(self, lost: str) -> list[str]:
        """Start a pool anew. Gives the names of the pools that were started."""


@dataclass
class Workers:
    """Recovers the workers of a run: takes commits, finds deaths, starts pools anew, and puts all pools back
    to a commit."""

    fleet: WorkerFleet
    engine: ClusterEngine
    roles: tuple[str, ...]  # that the run may change
    ahead: Ahead | None = None  # the look-ahead queue

    def commit(self, iteration: int) -> Commit:
        """Begin a commit before an iteration. Later calls of the workers' models come after it. Waits for
        rows that are being sampled, and raises the error of a sampling that fails."""
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
        """The worker's death that caused an error; None where none died, or not all processes of its pool
        could be ended."""
        causes = list(chain(error))
        if not any(isinstance(cause, RemoteError) for cause in causes):
            return None
        death = self.fleet.found(FOUND_SECONDS if any(isinstance(cause, Dead) for cause in causes) else 0.0)
        return death if death is not None and death.pool_ended else None

    def lost(self) -> str | None:
        """A text that says which controlling process of Ray has died; None where all are alive."""
        return self.fleet.lost()

    def restart(self, death: Death) -> list[str]:
        """Start the pool of a dead worker anew. Gives the names of the pools that were started."""
        if self.ahead is not None:
            self.ahead.drop()
        return self.fleet.restart(death.pool)

    def copied(self, commit: Commit) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(role, state of its trainer) of a complete commit, which needs no worker. Raises RemoteError for a
        copy that is gone."""
        for role, copy in commit.states.items():
            trainer = self.engine.models[role].trainer
            assert trainer is not None
            try:
                yield role, unpack_tensors(trainer.pool.transport.future(copy.ref).result(READ_SECONDS))
            except Exception as error:  # of Ray's many, or one of the worker's
                raise RemoteError(f"the copy of the state of '{role}' cannot be read: {error}") from error

    def restore(self, commit: Commit) -> None:
        """Put all pools back to a commit. The stream of prompts stands where it did then."""
        for role, copy in commit.states.items():
            trainer = self.engine.models[role].trainer
            assert trainer is not None
            trainer.pool.call("restore", role, copy.ref, seconds=MOVE_SECONDS, group="model").result()
        for role, version in commit.versions.items():
            self.engine.models[role].restored(version)
        if self.ahead is not None and commit.queue is not None:
            self.ahead.restore(*commit.queue)
        self.engine.ran()  # drops the spans of iterations that are done again
        self.engine.traffic()


def chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it came of."""
    return [error, *chain(error.__cause__ or error.__context__)] if error is not None else []
