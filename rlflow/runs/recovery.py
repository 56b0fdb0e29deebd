"""Recovery of a run on pools. State is copied out of the workers while the run continues. If a worker dies,
its pool is restarted from the newest copy.

At most ``--commit-every`` finished iterations are repeated, in addition to the one in progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlflow.errors import PlanError, RemoteError, StageError

DEATHS = 3  # the run ends after this many deaths without a newly finished iteration in between
COPIED_SECONDS = 600.0  # time limit for copying state out of the workers

R = TypeVar("R")
S = TypeVar("S")


class Commit(Protocol):
    """An in-memory checkpoint: a copy of the workers' state outside the workers."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Role → number of updates that its weights have had."""

    @property
    def queue(self) -> tuple[Mapping[str, Any], Mapping[str, bytes]] | None:
        """The rows that were sampled ahead of training; None if there are none."""

    @property
    def complete(self) -> bool:
        """True if all parts of the copy have arrived."""

    def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until the copy is complete. Returns whether it is."""

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` when each part of the copy arrives, maybe in another thread."""


class Workers(Protocol):
    """The pools of a run, as recovery uses them."""

    def commit(self, iteration: int) -> Any:
        """Start to copy the state before an iteration."""

    def death(self, error: BaseException) -> Any:
        """Return a description of the death behind an error. None if nobody died, or if the remaining
        processes cannot be stopped."""

    def lost(self) -> str | None:
        """Return a description of a loss that rules out restarting a pool; None without one."""

    def restart(self, death: Any) -> list[str]:
        """Restart what died. Returns the names of the restarted pools."""

    def restore(self, commit: Any) -> None:
        """Put all pools back to a commit."""

    def copied(self, commit: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (role, state of its trainer) of a complete commit."""


@dataclass(frozen=True)
class DriverState(Generic[S]):
    """The run's own state outside the workers, and how to restore it."""

    capture: Callable[[], S]  # returns a copy of the current state
    rewind: Callable[[S], object]  # put back the stream of prompts, before workers are restored
    replay: Callable[[int, S], object]  # forget an iteration and all later ones; they are repeated


@dataclass(frozen=True)
class RecoveryPoint(Generic[S]):
    """The state of a run before an iteration."""

    iteration: int
    commit: Commit  # the workers' state
    driver: S  # the run's own


class Recovery(Generic[S]):
    """Keeps the newest point that a run can return to, and the point that is being copied."""

    def __init__(
        self, workers: Workers | None, every: int, driver: DriverState[S], note: Callable[[str], None]
    ) -> None:
        """``workers``: None without pools. ``every``: iterations between commits; 0 turns recovery off.
        ``note``: called with a line for each recovery."""
        self.workers = workers if every else None
        self.every, self.driver, self.note = every, driver, note
        self.last: RecoveryPoint[S] | None = None
        self.next: RecoveryPoint[S] | None = None
        self._turn = threading.Lock()
        self.furthest = -1  # the latest iteration that began
        self.current = 0  # the iteration in progress
        self.deaths = 0  # since the furthest iteration began

    def run(self, offload_plan: Callable[[int], R], first: int) -> R:
        """Call ``offload_plan`` with the first iteration, and restart it from a commit after each worker death.
        Returns its result. Raises its errors if they are not a death, or if recovery is impossible."""
        self.commit(first)
        while True:
            try:
                return offload_plan(first)
            except (StageError, RemoteError) as error:
                first = self._go_back(error)

    def commit(self, iteration: int) -> None:
        """Copy the state before the iteration, if a copy is due. The former commit is dropped when this one
        is complete."""
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
        """Replace the last point by the next one, once that is complete."""
        with self._turn:
            if self.next is not None and self.next.commit.complete:
                self.last, self.next = self.next, None

    def newest(self) -> RecoveryPoint[S] | None:
        """Return the newest point, for a run that ends; None without one."""
        if self.workers is None:
            return None
        self._settle()
        return self.last

    def _settle(self) -> None:
        """Wait for the next point. It is dropped if it does not become complete."""
        with self._turn:
            point = self.next
        if point is not None:
            point.commit.settled(COPIED_SECONDS)
            self._take_next()
            self.next = None

    def _go_back(self, error: StageError | RemoteError) -> int:
        """Recover. Returns the iteration to restart from, or raises the error with the reason why recovery is
        impossible."""
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
        """Restart what died, put everything back to the last point, and return its iteration."""
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
    """Return a line that says who died, when, and from where the run continues."""
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
