"""Retries of questions: with growing pauses, as long as a wait may mend the failure, until the deadline."""

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

# seconds of the first pause, factor from one to the next, seconds of the longest
FIRST, GROWTH, LONGEST = 0.1, 2.0, 5.0
LEAST = 0.05  # seconds: a question with less time left is not asked again, and no pause is shorter
DEFAULT = 60.0  # seconds of a question whose caller has no deadline
# share of a call's deadline that is left to the caller, so that it hears of the failure and is not killed
MARGIN = 0.05

# second of the clock by which the present call must end
_limit: ContextVar[float | None] = ContextVar("limit", default=None)


class Unanswered(ConnectionError):
    """A question has no answer. ``cause``: connection, status, timeout or reply."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Passing(Unanswered):
    """A question has no answer for a reason that may pass. ``after``: the seconds that the server asks to
    wait, if it does."""

    def __init__(self, cause: str, message: str, after: float | None = None) -> None:
        super().__init__(cause, message)
        self.after = after


@dataclass(frozen=True)
class Patience:
    """Asks again. ``clock``: gives the seconds that deadlines count; ``pause``: waits for so many seconds."""

    clock: Callable[[], float] = outages.clock
    pause: Callable[[float], object] = time.sleep

    def answer(self, ask: Callable[[float], T], seconds: float) -> T:
        """What ``ask`` gives, which is called with the seconds that are left of ``seconds`` in all, and again
        after it raised Passing. Raises Unanswered once no time is left, or the server asks to wait for longer
        than that."""
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
    """While inside, questions of this thread or task end a little before so many seconds have passed."""
    return with_value(_limit, clock() + seconds * (1 - MARGIN))


def left(clock: Callable[[], float] = outages.clock) -> float:
    """Seconds that a question may take now: what is left of the call that it belongs to, or a default outside
    of any."""
    limit = _limit.get()
    return DEFAULT if limit is None else max(limit - clock(), LEAST)
