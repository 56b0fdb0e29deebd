"""Retry requests with growing pauses until one succeeds, can't succeed, or time runs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from rlflow.author.scope import with_value
from rlflow.processes.clients import outages

T = TypeVar("T")

# Seconds of the first pause, growth factor, seconds of the longest pause.
FIRST, GROWTH, LONGEST = 0.1, 2.0, 5.0
LEAST = 0.05  # seconds: the shortest pause, and the least time left for a retry
DEFAULT = 60.0  # seconds for a request whose caller has no deadline
# Share of a call's time that is reserved for the caller, so that it learns of the failure before it is
# killed.
MARGIN = 0.05

# When the current call must be over, on the clock.
_limit: ContextVar[float | None] = ContextVar("limit", default=None)


class Unanswered(ConnectionError):
    """A request failed. ``cause``: connection, status, timeout or reply."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Passing(Unanswered):
    """A request failed, perhaps only for now.

    ``after``: how many seconds the server asks to wait, or None.
    """

    def __init__(self, cause: str, message: str, after: float | None = None) -> None:
        super().__init__(cause, message)
        self.after = after


@dataclass(frozen=True)
class Patience:
    """Decides when to retry requests.

    ``clock`` returns the time in seconds. ``pause`` waits for a number of seconds.
    """

    clock: Callable[[], float] = outages.clock
    pause: Callable[[float], object] = time.sleep

    def answer(self, ask: Callable[[float], T], seconds: float) -> T:
        """Call ``ask`` with the seconds left until it no longer raises Passing, and return its result.

        ``seconds``: the time for all tries together. Raises Unanswered when time runs out, or if the server
        asks to wait longer than that.
        """
        limit, longest, tries = self.clock() + seconds, FIRST, 0
        while True:
            tries += 1
            try:
                return ask(max(limit - self.clock(), LEAST))
            except Passing as failure:
                left = limit - self.clock()
                if left <= LEAST or (failure.after or 0.0) > left:
                    raise Unanswered(
                        failure.cause,
                        f"{failure} ({_counted(tries)} in {seconds - left:.3g} of {seconds:g} s)",
                    ) from failure
                pause = max(failure.after or 0.0, min(longest, left / 2), LEAST)
            self.pause(pause)
            longest = min(longest * GROWTH, LONGEST)


def _counted(tries: int) -> str:
    return "1 try" if tries == 1 else f"{tries} tries"


def within(seconds: float, clock: Callable[[], float] = outages.clock) -> AbstractContextManager[None]:
    """Make requests inside the context finish within about ``seconds``, just before the caller's deadline.

    This applies to requests from the current thread or async task.
    """
    return with_value(_limit, clock() + seconds * (1 - MARGIN))


def left(clock: Callable[[], float] = outages.clock) -> float:
    """Return how many seconds a request may take now.

    This is the time left for the current call of a reward, environment or tool, or DEFAULT outside of such
    calls.
    """
    limit = _limit.get()
    return DEFAULT if limit is None else max(limit - clock(), LEAST)
