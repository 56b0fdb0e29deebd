"""Recovery of a run on pools: state is copied out of the workers as the run goes, and a pool whose worker
died is started anew from there.

At most ``--commit-every`` finished iterations are done again, and the one that was under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlflow.errors import PlanError, RemoteError, StageError

DEATHS = 3  # without a new iteration finished in between that end a run
COPIED_SECONDS = 600.0  # how long state may take to be out of the workers

R = TypeVar("R")
S = TypeVar("S")


class Commit(Protocol):
    """A copy of the workers' state, outside of the workers."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Role → updates behind its weights."""

    @property
    def queue(self) -> tuple[Mapping[str, Any], Mapping[str, bytes]] | None:
        """The rows that were sampled ahead; None if none were."""

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""

    def settled(self, seconds: float) -> bool:
        """Wait until it is complete, at most so many seconds; whether it is."""

    def then(self, action: Callable[[], object]) -> None:
        """Do something as each part of it is there, maybe in another thread."""


class Workers(Protocol):
    """The pools of a run, as far as recovery is concerned."""

    def commit(self, iteration: int) -> Any:
        """Begin to copy the state before an iteration."""

    def death(self, error: BaseException) -> Any:
        """The death that is behind an error, in words; None where nobody died, or where what is left cannot
        be ended."""

    def lost(self) -> str | None:
        """A loss for which no pool can be started anew, in words; None where there is none."""

    def restart(self, death: Any) -> list[str]:
        """Start what died anew; the names of the pools that were started."""

    def restore(self, commit: Any) -> None:
        """Put all pools back to a commit."""

    def copied(self, commit: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(role, state of its trainer) of a complete commit."""


@dataclass(frozen=True)
class DriverState(Generic[S]):
    """The run's own state, which is outside of the workers, and how it is put back."""

    capture: Callable[[], S]  # a copy of the state as it is now
    rewind: Callable[[S], object]  # put back what workers are restored beside: the stream of prompts
    replay: Callable[[int, S], object]  # forget an iteration and those after it, which are done again


@dataclass(frozen=True)
class RecoveryPoint(Generic[S]):
    """A run before an iteration."""

    iteration: int
    commit: Commit  # the workers' state
    driver: S  # the run's own


class Recovery(Generic[S]):
    """Keeps the newest point to which a run can go back, and the one that is being copied."""

    def __init__(
        self, workers: Workers | None, every: int, driver: DriverState[S], note: Callable[[str], None]
    ) -> None:
        """``workers``: None where there are no pools. ``every``: iterations between commits; 0: nothing is
        recovered. ``note`` is told of each recovery."""
        self.workers = workers if every else None
        self.every, self.driver, self.note = every, driver, note
        self.last: RecoveryPoint[S] | None = None
        self.next: RecoveryPoint[S] | None = None
        self._turn = threading.Lock()
        self.furthest = -1  # iteration that began
        self.current = 0  # the iteration that is under way
        self.deaths = 0  # since the furthest iteration began

    def run(self, course: Callable[[int], R], first: int) -> R:
        """Call ``course`` with the first iteration, and again with one to go on from after each death; what
        it gives. Raises what it raises where that is no death, or cannot be recovered from."""
        self.commit(first)
        while True:
            try:
                return course(first)
            except (StageError, RemoteError) as error:
                first = self._go_back(error)

    def commit(self, iteration: int) -> None:
        """Copy what the iteration begins with, if it is time to. The former commit goes when this one is
        complete."""
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
        """Put the next point in the place of the last one, once it is complete."""
        with self._turn:
            if self.next is not None and self.next.commit.complete:
                self.last, self.next = self.next, None

    def newest(self) -> RecoveryPoint[S] | None:
        """The newest point, for a run that goes on no more; None where there is none."""
        if self.workers is None:
            return None
        self._settle()
        return self.last

    def _settle(self) -> None:
        """Wait for the next point; it is forgotten where it does not come to be complete."""
        with self._turn:
            point = self.next
        if point is not None:
            point.commit.settled(COPIED_SECONDS)
            self._take_next()
            self.next = None

    def _go_back(self, error: StageError | RemoteError) -> int:
        """Recover; the iteration to go on with. Raises the error with the reason where that cannot be."""
        failure: Exception = error
        while self.workers is not None and (death := self.workers.death(failure)) is not None:
            self.deaths += 1
            if self.deaths >= DEATHS:
                raise with_reason(
                    error, f"given up: {DEATHS} deaths without an iteration finished in between"
                )
            try:
                return self._restore(self.workers, death, error)
            except (RemoteError, PlanError) as again:
                failure = again
        raise error if failure is error else with_reason(error, f"not recovered: {failure}")

    def _restore(self, workers: Workers, death: Any, error: StageError | RemoteError) -> int:
        """Start anew what died, and put everything back to the last point; its iteration."""
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
    """A line for people: who died, when, and where the run goes on."""
    noticed = (
        f"stage '{error.stage}' of iteration {error.iteration}"
        if isinstance(error, StageError)
        else f"iteration {under_way}"
    )
    anew = f"pool{'s' * (len(pools) > 1)} {', '.join(map(repr, pools))}"
    again = f"iteration {back} is" if back >= under_way else f"iterations {back} to {under_way} are"
    return (
        f"{death}; noticed in {noticed}. Recovered in {seconds:.1f} s: {anew} started anew, all state as "
        f"before iteration {back}; {again} repeated"
    )


def with_reason(error: StageError | RemoteError, reason: str) -> StageError | RemoteError:
    """The error that ends the run, and why it does."""
    if isinstance(error, RemoteError):
        return RemoteError(f"{error}\n  {reason}", error.failure)
    error.message += f"\n  {reason}"
    return error
