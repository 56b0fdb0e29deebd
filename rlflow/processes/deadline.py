"""Deadlines that count only seconds in which this process could run, not those in which it was stopped
(SIGSTOP, ctrl-Z, machine asleep)."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 0.25  # seconds; a caller that waits asks a deadline at least this often


class Deadline:
    """A deadline so many seconds from now. Its ``left`` has to be called every ``LOOK`` seconds or more
    often: where much more time than that has passed since the last call, the process could not run, and only
    ``LOOK`` seconds count. ``clock``: gives seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked = seconds, clock, clock()

    def left(self) -> float:
        """Seconds that are left; below 0 once the deadline has passed."""
        now = self._clock()
        elapsed, self._looked = now - self._looked, now
        self._left -= elapsed if elapsed <= 2 * LOOK else LOOK
        return self._left

    def wait(self) -> float:
        """How many seconds to wait before the next call of ``left``."""
        return min(max(self.left(), 0.0), LOOK)
