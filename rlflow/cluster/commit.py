"""Commits: what trained roles are and what was sampled ahead, as objects of Ray outside of the workers, and the way back to them.

The driver owns the objects and never opens them: workers make them as results of calls and get them back as arguments of others. Rows
are few bytes, which it keeps packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from rlflow.cluster.engine import ClusterEngine
from rlflow.cluster.fleet import Fleet
from rlflow.cluster.health.monitor import Death
from rlflow.cluster.weights.models import MOVE_SECONDS, RemoteTrainer
from rlflow.errors import Dead, RemoteError
from rlflow.execution.lookahead import Ahead

FOUND_SECONDS = 30.0  # how long a failed call waits for the watch to say who died


@dataclass(frozen=True)
class Copy:
    """An object outside of the workers, and how many bytes it has once it is there."""

    ref: Any
    size: Future[int]

    @staticmethod
    def of(trainer: RemoteTrainer) -> Copy:
        """Of a trainer's state."""
        ref, size = trainer.begin("commit", answers=2)
        return Copy(ref, size.future())


@dataclass(frozen=True)
class Commit:
    """states: of each trained role. versions: how many updates are behind each role. queue: what is sampled ahead, and its rows packed."""

    states: Mapping[str, Copy]
    versions: Mapping[str, int]
    queue: tuple[Mapping[str, Any], Mapping[str, bytes]] | None

    def settled(self, seconds: float) -> bool:
        """Whether all of it is outside of the workers; waited for as long as that."""
        wait([copy.size for copy in self.states.values()], seconds)
        return self.complete

    def then(self, action: Callable[[], object]) -> None:
        """Do something as each part is there, in a thread of Ray's. What is copied holds no reference to this commit."""
        for copy in self.states.values():
            copy.size.add_done_callback(lambda _: action())

    @property
    def complete(self) -> bool:
        return all(copy.size.done() and copy.size.exception() is None for copy in self.states.values())


@dataclass
class Workers:
    """What recovers a run: takes commits, tells deaths, starts pools anew and puts all of them back to a commit. roles: the trained."""

    fleet: Fleet
    engine: ClusterEngine
    roles: tuple[str, ...]
    ahead: Ahead | None = None

    def commit(self, iteration: int) -> Commit:
        """Begin to copy the state before an iteration. What is asked of a worker's models from now on comes after. Waits for rows that are
        being sampled: raises what keeps them from it."""
        trainers = {role: self.engine.models[role].trainer for role in self.roles}
        states = {role: Copy.of(trainer) for role, trainer in trainers.items() if trainer}
        versions = {role: model.version for role, model in self.engine.models.items()}
        return Commit(states, versions, self.ahead.saved(iteration) if self.ahead else None)

    def death(self, error: BaseException) -> Death | None:
        """Whose death is behind an error; None where nobody died, or not all processes of a pool could be ended."""
        causes = list(chain(error))
        if not any(isinstance(cause, RemoteError) for cause in causes):
            return None
        found = self.fleet.watch.found(FOUND_SECONDS if any(isinstance(cause, Dead) for cause in causes) else 0.0)
        return found if found is not None and found.gone else None

    def lost(self) -> str | None:
        """What of Ray itself is lost, in words."""
        return self.fleet.controllers.lost()

    def restart(self, death: Death) -> list[str]:
        """Start the pool of a dead worker anew; names of the pools that were started."""
        if self.ahead is not None:
            self.ahead.drop()
        names = self.fleet.restart(death.pool)
        self.engine.placement = self.fleet.placement  # they may be on other machines
        return names

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
        self.engine.ran()  # of what is done again nothing is told


def chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it came of."""
    return [error, *chain(error.__cause__ or error.__context__)] if error is not None else []
