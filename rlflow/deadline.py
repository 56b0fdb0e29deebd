"""Deadlines in seconds of running: time in which this process was stopped (SIGSTOP, ctrl-Z, a machine asleep) does not count."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 0.25  # seconds; who waits looks at least as often as this


class Deadline:
    """So many seconds from now on. ``left`` is asked again and again, every ``LOOK`` seconds or more often: where much longer has passed
    since it was asked last, the process could not run, and one look is what counts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked = seconds, clock, clock()

    def left(self) -> float:
        """Seconds until it is over; below 0 where it is."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        self._left -= passed if passed <= 2 * LOOK else LOOK
        return self._left

    def wait(self) -> float:
        """How long to wait before the next look."""
        return min(max(self.left(), 0.0), LOOK)
