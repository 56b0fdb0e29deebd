"""Recovery of a run on pools.

As the run goes on, state is copied out of the workers. If a worker dies, its pool is restarted, and all pools
go back to the newest copy. This repeats at most ``--commit-every`` finished iterations, plus the one in
progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlflow.errors import PlanError, RemoteError, StageError

DEATHS = 3  # the run ends after this many deaths without a newly finished iteration
COPIED_SECONDS = 600.0  # time limit for copying state out of the workers

R = TypeVar("R")
S = TypeVar("S")


class Commit(Protocol):
    """An in-memory checkpoint: a copy of the workers' state that is kept outside the workers."""

    @property
    def versions(self) -> Mapping[str, int]:
        """How many updates each role's copied weights have had."""

    @property
    def queue(self) -> tuple[Mapping[str, Any], Mapping[str, bytes]] | None:
        """The rows sampled ahead of training, as returned by ``Ahead.saved``, or None if there are none."""

    @property
    def complete(self) -> bool:
        """Whether all parts of the in-memory checkpoint have arrived."""

    def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the in-memory checkpoint to be complete. Return whether it is."""

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` whenever part of the in-memory checkpoint arrives, possibly in another thread."""


class Workers(Protocol):
    """A run's pools, as seen by recovery."""

    def commit(self, iteration: int) -> Any:
        """Start copying the state before an iteration, and return the in-memory checkpoint (a Commit)."""

    def death(self, error: BaseException) -> Any:
        """Describe the worker death that caused ``error``.

        Returns None if no worker died, or if the remaining processes can't be stopped.
        """

    def lost(self) -> str | None:
        """Return why pools can no longer be restarted, or None if they can."""

    def restart(self, death: Any) -> list[str]:
        """Restart the pools of workers that have died, and return these pools' names."""

    def restore(self, commit: Any) -> None:
        """Set all pools back to an in-memory checkpoint."""

    def copied(self, commit: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (role, its trainer's state) from a complete in-memory checkpoint."""


@dataclass(frozen=True)
class DriverState(Generic[S]):
    """Functions that copy and restore the state that a run keeps outside the workers."""

    capture: Callable[[], S]  # returns a copy of the current state
    rewind: Callable[[S], object]  # rewinds the prompts, before workers are restored
    replay: Callable[[int, S], object]  # prepares to repeat an iteration and all later ones


@dataclass(frozen=True)
class RecoveryPoint(Generic[S]):
    """A state that a run can go back to: its state before an iteration."""

    iteration: int
    commit: Commit  # the workers' state
    driver: S  # the run's own state outside the workers


class Recovery(Generic[S]):
    """Keeps a run's newest recovery point, and the next one while its state is being copied."""

    def __init__(
        self, workers: Workers | None, every: int, driver: DriverState[S], note: Callable[[str], None]
    ) -> None:
        """Set up recovery for a run.

        ``workers``: the pools, or None for a run in one process. ``every``: how many iterations there are
        between in-memory checkpoints; 0 turns recovery off. ``note``: called with a message after each
        recovery.
        """
        self.workers = workers if every else None
        self.every, self.driver, self.note = every, driver, note
        self.last: RecoveryPoint[S] | None = None
        self.next: RecoveryPoint[S] | None = None
        self._turn = threading.Lock()
        self.furthest = -1  # the latest iteration that has started
        self.current = 0  # the iteration in progress
        self.deaths = 0  # number of deaths since the furthest iteration started

    def run(self, offload_plan: Callable[[int], R], first: int) -> R:
        """Run all iterations from ``first`` on, recovering whenever a worker dies.

        ``offload_plan``: runs all iterations from a given one on. When a worker dies, it is called again with
        the iteration to restart from. Returns what it returns. Raises its error if no worker died or recovery
        is impossible.
        """
        self.commit(first)
        while True:
            try:
                return offload_plan(first)
            except (StageError, RemoteError) as error:
                first = self._go_back(error)

    def commit(self, iteration: int) -> None:
        """Start copying the state before an iteration if a copy is due.

        Once the new copy is complete, the previous one is dropped.
        """
        self.current = iteration
        if self.workers is None:
            return
        if iteration > self.furthest:
            self.furthest, self.deaths = iteration, 0
        with self._turn:
            newest = self.next or self.last
        if newest is not None and iteration < newest.iteration + self.every:
            return
        self._settle()
        commit = self.workers.commit(iteration)
        self.next = RecoveryPoint(iteration, commit, self.driver.capture())
        commit.then(self._take_next)

    def _take_next(self) -> None:
        """If the in-memory checkpoint in progress is complete, make it the one to recover from."""
        with self._turn:
            if self.next is not None and self.next.commit.complete:
                self.last, self.next = self.next, None

    def newest(self) -> RecoveryPoint[S] | None:
        """Return the newest complete recovery point of a run that is ending, or None if there is none."""
        if self.workers is None:
            return None
        self._settle()
        return self.last

    def _settle(self) -> None:
        """Wait for the in-memory checkpoint in progress, and drop it if it can't be completed."""
        with self._turn:
            point = self.next
        if point is not None:
            point.commit.settled(COPIED_SECONDS)
            self._take_next()
            self.next = None

    def _go_back(self, error: StageError | RemoteError) -> int:
        """Recover from a worker's death, and return the iteration to restart from.

        If this is impossible, raise the error with the reason added.
        """
        failure: Exception = error
        while self.workers is not None and (death := self.workers.death(failure)) is not None:
            self.deaths += 1
            if self.deaths >= DEATHS:
                raise with_reason(
                    error, f"the run gives up: {DEATHS} deaths without a finished iteration in between"
                )
            try:
                return self._restore(self.workers, death, error)
            except (RemoteError, PlanError) as again:
                failure = again
        raise error if failure is error else with_reason(error, f"not recovered: {failure}")

    def _restore(self, workers: Workers, death: Any, error: StageError | RemoteError) -> int:
        """Restart the pools of workers that have died, and set all pools back to the last recovery point.

        Returns the iteration of that point.
        """
        began = time.monotonic()
        pools = workers.restart(death)
        self._settle()
        if self.last is None:
            raise RemoteError("the first commit was not complete")
        point = self.last
        self.driver.rewind(point.driver)
        workers.restore(point.commit)
        self.driver.replay(point.iteration, point.driver)
        self.note(recovery_note(death, error, pools, point.iteration, self.current, time.monotonic() - began))
        return point.iteration


def recovery_note(
    death: Any, error: StageError | RemoteError, pools: list[str], back: int, under_way: int, seconds: float
) -> str:
    """Return a message that says which worker died, when, and from which iteration the run goes on.

    ``back``: the iteration to restart from. ``under_way``: the iteration in progress. ``seconds``: how long
    the recovery took.
    """
    noticed = (
        f"stage '{error.stage}' of iteration {error.iteration}"
        if isinstance(error, StageError)
        else f"iteration {under_way}"
    )
    anew = f"pool{'s' * (len(pools) > 1)} {', '.join(map(repr, pools))}"
    again = f"iteration {back} is" if back >= under_way else f"iterations {back} to {under_way} are"
    return (
        f"{death}; noticed in {noticed}. Recovered in {seconds:.1f} s: restarted {anew}, restored all "
        f"state from before iteration {back}; {again} repeated"
    )


def with_reason(error: StageError | RemoteError, reason: str) -> StageError | RemoteError:
    """Return the error that ends the run, with the reason added."""
    if isinstance(error, RemoteError):
        return RemoteError(f"{error}\n  {reason}", error.failure)
    error.message += f"\n  {reason}"
    return error
