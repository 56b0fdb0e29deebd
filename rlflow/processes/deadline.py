"""Deadlines that count only the time during which this process can run.

Time during which the process is stopped (SIGSTOP, Ctrl-Z, or a sleeping machine) does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 0.25  # seconds; a waiting caller must check its deadline at least this often


class Deadline:
    """A deadline ``seconds`` from now.

    Call ``left`` at least every ``LOOK`` seconds. If more than twice ``LOOK`` seconds have passed between two
    calls, the process must have been stopped, and only ``LOOK`` seconds are counted. ``clock``: a function
    that returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked = seconds, clock, clock()

    def left(self) -> float:
        """Return the seconds left until the deadline; below 0 after it."""
        now = self._clock()
        elapsed, self._looked = now - self._looked, now
        self._left -= elapsed if elapsed <= 2 * LOOK else LOOK
        return self._left

    def wait(self) -> float:
        """Return the number of seconds that the caller may wait before it calls ``left`` again."""
        return min(max(self.left(), 0.0), LOOK)
