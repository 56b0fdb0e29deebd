"""Recovery of a run on pools.

While the run continues, state is copied out of the workers. If a worker dies, its pool is restarted, and all
pools continue from the newest copy. The run repeats at most ``--commit-every`` finished iterations, and the
iteration in progress.
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
    """An in-memory checkpoint: a copy of the workers' state, stored outside the workers."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Role → number of updates that its copied weights have had."""

    @property
    def queue(self) -> tuple[Mapping[str, Any], Mapping[str, bytes]] | None:
        """Rows that were sampled ahead of training, as ``Ahead.saved`` returns them; None if there are
        none."""

    @property
    def complete(self) -> bool:
        """Whether all parts of the in-memory checkpoint have arrived."""

    def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until the in-memory checkpoint is complete. Return whether it is
        complete."""

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` each time a part of the in-memory checkpoint arrives, possibly in another
        thread."""


class Workers(Protocol):
    """The pools of a run, as recovery uses them."""

    def commit(self, iteration: int) -> Any:
        """Start to copy the state before an iteration. Return the in-memory checkpoint (a Commit)."""

    def death(self, error: BaseException) -> Any:
        """Return a description of the worker death that caused ``error``.

        Returns None if no worker died, or if the remaining processes cannot be stopped.
        """

    def lost(self) -> str | None:
        """Return the reason, as text, if pools can no longer be restarted; otherwise None."""

    def restart(self, death: Any) -> list[str]:
        """Restart the pools of the workers that died. Return the names of these pools."""

    def restore(self, commit: Any) -> None:
        """Set all pools back to an in-memory checkpoint."""

    def copied(self, commit: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (role, state of its trainer) from a complete in-memory checkpoint."""


@dataclass(frozen=True)
class DriverState(Generic[S]):
    """Functions that copy and restore the run's own state, which is outside the workers."""

    capture: Callable[[], S]  # returns a copy of the current state
    rewind: Callable[[S], object]  # sets the stream of prompts back, before workers are restored
    replay: Callable[[int, S], object]  # prepares to repeat an iteration and all later ones


@dataclass(frozen=True)
class RecoveryPoint(Generic[S]):
    """A state to which a run can return: the state before an iteration."""

    iteration: int
    commit: Commit  # the workers' state
    driver: S  # the run's own state outside the workers


class Recovery(Generic[S]):
    """Keeps the newest recovery point of a run, and the next one while its state is being copied."""

    def __init__(
        self, workers: Workers | None, every: int, driver: DriverState[S], note: Callable[[str], None]
    ) -> None:
        """Make the recovery of a run.

        ``workers``: the pools, or None for a run in one process. ``every``: iterations between two in-memory
        checkpoints; 0 turns recovery off. ``note``: called with a message after each recovery.
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
        """Run iterations from ``first`` to the end, and recover after each worker death.

        ``offload_plan``: runs all iterations from a given one. After a worker death, it is called again with
        the iteration to restart from. Returns its result. Raises its error if no worker died, or if recovery
        is impossible.
        """
        self.commit(first)
        while True:
            try:
                return offload_plan(first)
            except (StageError, RemoteError) as error:
                first = self._go_back(error)

    def commit(self, iteration: int) -> None:
        """Start to copy the state before an iteration, if a copy is due.

        When the new copy is complete, the previous copy is dropped.
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
        """Return the newest complete recovery point, for a run that ends; None if there is none."""
        if self.workers is None:
            return None
        self._settle()
        return self.last

    def _settle(self) -> None:
        """Wait until the in-memory checkpoint in progress is complete. If it does not become complete, drop
        it."""
        with self._turn:
            point = self.next
        if point is not None:
            point.commit.settled(COPIED_SECONDS)
            self._take_next()
            self.next = None

    def _go_back(self, error: StageError | RemoteError) -> int:
        """Recover from a worker death and return the iteration to restart from.

        If recovery is impossible, raise the error with the reason.
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
        """Restart the pools of the workers that died, and restore the last recovery point on all pools.

        Returns the iteration of this point.
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
    """Return a message that says which worker died, when, and from which iteration the run continues.

    ``back``: the iteration to restart from. ``under_way``: the iteration in progress. ``seconds``: duration
    of the recovery.
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
