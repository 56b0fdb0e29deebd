"""Freed memory of this process, given back where it piles up.

The activations of a step are freed at its end, and the next step allocates others, of other sizes. Small
things that stay come to lie between them, so that the C library finds room in ever fewer of the pieces that
it keeps: a process that gives none back grows with its steps. To give all of it back after each step would
cost 10 to 20 % of the time, since the kernel clears each page that is asked for again. So that is done once
an iteration at most, before a pass whose graph is kept for an update, and else when the process has grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH = 1.1  # of what the process had after a step that began with all freed memory given back


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back() -> None:
    """Give whole pages of freed memory back to the system, where the C library is glibc."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Gives freed memory back when it is told to, and when a process has grown by a tenth since it last did
    so.

    measure: gives the bytes that the process has; release: gives freed memory back."""

    def __init__(
        self, measure: Callable[[], int] = resident, release: Callable[[], None] = give_back
    ) -> None:
        self._measure, self._release = measure, release
        self._usual = 0  # the most bytes after a step that began with all freed memory given back
        self._given_back = True

    def give_back(self) -> None:
        """Give freed memory back now."""
        self._release()
        self._given_back = True

    def step_ended(self) -> None:
        """Look at the process after an optimizer step, and give memory back where it has grown."""
        size = self._measure()
        if self._given_back:
            self._usual = max(self._usual, size)
            self._given_back = False
        elif size > self._usual * GROWTH:
            self.give_back()


HEAP = Heap()  # one for all models of the process
