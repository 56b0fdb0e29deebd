"""Recovery of a run on pools: state is copied out of the workers as it goes, and a pool whose worker died is started anew from there.

At most ``--commit-every`` finished iterations are done again, and the one that was under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlflow.errors import PlanError, RemoteError, StageError

if TYPE_CHECKING:
    from rlflow.runs.loop import Loop, LoopTotals

DEATHS = 3  # without a new iteration finished in between that end a run
COPIED_SECONDS = 600.0  # how long state may take to be out of the workers

R = TypeVar("R")


class Commit(Protocol):
    """State outside of the workers."""

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""

    def settled(self, seconds: float) -> bool:
        """The same, waited for as long as that."""

    def then(self, action: Callable[[], object]) -> None:
        """Do something as each part of it is there, maybe in another thread."""


class Workers(Protocol):
    """The pools of a run, as far as recovery is concerned."""

    def commit(self, iteration: int) -> Any:
        """Begin to copy the state before an iteration."""

    def death(self, error: BaseException) -> Any:
        """Whose death is behind an error, in words; None where nobody's is, or where what is left cannot be ended."""

    def lost(self) -> str | None:
        """What is lost besides workers, in words, so that none can be started anew; None where nothing is."""

    def restart(self, death: Any) -> list[str]:
        """Start what died anew; names of the pools."""

    def restore(self, commit: Any) -> None:
        """Put all pools back to a commit."""


@dataclass(frozen=True)
class RecoveryPoint:
    """A run before an iteration: what is outside of the workers, and what the driver itself knew."""

    iteration: int
    commit: Commit
    cursor: Mapping[str, Any]
    state: dict[str, float]
    account: LoopTotals


class Recovery:
    """Keeps the last moment to which a loop can go back, and the one that is being copied."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.every = loop, loop.options.commit_every
        self.workers = loop.prepared.workers if self.every else None
        self.last: RecoveryPoint | None = None
        self.next: RecoveryPoint | None = None
        self._turn = threading.Lock()
        self.furthest = -1  # iteration that began
        self.deaths = 0  # since then

    def run(self, course: Callable[[int], R], first: int) -> R:
        """What ``course`` gives from the first iteration on, or from the last moment after each death. Raises what it raises where that
        is no death, or cannot be recovered from."""
        self.commit(first)
        while True:
            try:
                return course(first)
            except (StageError, RemoteError) as error:
                first = self._back_after(error)

    def commit(self, iteration: int) -> None:
        """Copy what the iteration begins with, if it is time to. The former commit goes when this one is complete."""
        if self.workers is None:
            return
        if iteration > self.furthest:
            self.furthest, self.deaths = iteration, 0
        with self._turn:
            newest = self.next or self.last
        if newest is not None and iteration < newest.iteration + self.every:
            return
        self._settle()
        prepared = self.loop.prepared
        commit = self.workers.commit(iteration)
        self.next = RecoveryPoint(iteration, commit, prepared.prompts.state(), dict(prepared.engine.state), self.loop.account())
        commit.then(self._take_next)

    def _take_next(self) -> None:
        """Have the next moment be the last one, and the last one gone, once it is complete."""
        with self._turn:
            if self.next is not None and self.next.commit.complete:
                self.last, self.next = self.next, None

    def _settle(self) -> None:
        """Wait for the next moment; it is forgotten where it does not come to be complete."""
        with self._turn:
            moment = self.next
        if moment is not None:
            moment.commit.settled(COPIED_SECONDS)
            self._take_next()
            self.next = None

    def _back_after(self, error: StageError | RemoteError) -> int:
        """The iteration to go on with. Raises the error with the reason where there is none."""
        failure: Exception = error
        while self.workers is not None and (death := self.workers.death(failure)) is not None:
            self.deaths += 1
            if self.deaths >= DEATHS:
                raise with_reason(error, f"given up: {DEATHS} deaths without an iteration finished in between")
            try:
                return self._back(death, error)
            except (RemoteError, PlanError) as again:
                failure = again
        raise error if failure is error else with_reason(error, f"not recovered: {failure}")

    def _back(self, death: Any, error: StageError | RemoteError) -> int:
        """Start anew what died, and put everything back."""
        assert self.workers is not None
        began, prepared = time.monotonic(), self.loop.prepared
        pools = self.workers.restart(death)
        self._settle()
        if self.last is None:
            raise RemoteError("the first commit was not complete")
        last = self.last
        prepared.prompts.load(last.cursor)
        self.workers.restore(last.commit)
        prepared.engine.state = dict(last.state)
        self.loop.back_to(last.iteration, last.account)
        self.loop.reporter.note(told(death, error, pools, last.iteration, prepared.engine.iteration, time.monotonic() - began))
        return last.iteration


def told(death: Any, error: StageError | RemoteError, pools: list[str], back: int, under_way: int, seconds: float) -> str:
    """A line for people: who died, when, and where the run goes on."""
    noticed = f"stage '{error.stage}' of iteration {error.iteration}" if isinstance(error, StageError) else f"iteration {under_way}"
    anew = f"pool{'s' * (len(pools) > 1)} {', '.join(map(repr, pools))}"
    again = f"iteration {back} is" if back >= under_way else f"iterations {back} to {under_way} are"
    return (f"{death}; noticed in {noticed}. Recovered in {seconds:.1f} s: {anew} started anew, all state as before iteration {back}; "
            f"{again} repeated")


def with_reason(error: StageError | RemoteError, reason: str) -> StageError | RemoteError:
    """The error that ends the run, and why it does."""
    if isinstance(error, RemoteError):
        return RemoteError(f"{error}\n  {reason}")
    error.message += f"\n  {reason}"
    return error
