"""Deadlines that only count time in which this process can run.

The clock stands still while the process is stopped (SIGSTOP, Ctrl-Z, or a sleeping machine).
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 0.25  # seconds; a waiting caller must check its deadline at least this often


class Deadline:
    """A deadline ``seconds`` from now.

    Call ``left`` at least every ``LOOK`` seconds. If more than twice that time passes between two calls, the
    process must have been stopped, and only ``LOOK`` seconds are counted. ``clock``: a function that returns
    the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked = seconds, clock, clock()

    def left(self) -> float:
        """Return the seconds left, which are negative after the deadline."""
        now = self._clock()
        elapsed, self._looked = now - self._looked, now
        self._left -= elapsed if elapsed <= 2 * LOOK else LOOK
        return self._left

    def wait(self) -> float:
        """Return how many seconds the caller may wait before calling ``left`` again."""
        return min(max(self.left(), 0.0), LOOK)
