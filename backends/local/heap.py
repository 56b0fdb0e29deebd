"""Return freed memory to the system when too much of it piles up.

Each step frees its activations when it ends, and the next one allocates activations of other sizes. Small
objects that remain between them fragment the memory, so the C library can reuse less and less of it, and a
process that never returns memory grows with every step. Returning all memory after each step would take 10 to
20 % of the time, because the kernel clears every page that is requested again.

Memory is therefore returned at most once per iteration, before a pass whose graph is kept for an update.
Otherwise it is returned only if the process has grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH = 1.1  # relative to the process size after a step that began with all freed memory returned


def resident() -> int:
    """Return this process's resident memory in bytes, or 0 if the system doesn't report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back() -> None:
    """Return this process's free pages to the system. Without glibc, this does nothing."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Returns freed memory to the system on request, or if the process has grown by a tenth.

    measure: returns the size of the process in bytes. release: returns freed memory to the system.
    """

    def __init__(
        self, measure: Callable[[], int] = resident, release: Callable[[], None] = give_back
    ) -> None:
        self._measure, self._release = measure, release
        self._usual = 0  # largest size after a step that began with all freed memory returned
        self._given_back = True

    def give_back(self) -> None:
        """Return freed memory to the system now."""
        self._release()
        self._given_back = True

    def step_ended(self) -> None:
        """Return freed memory if the process has grown. Call this after each optimizer step."""
        size = self._measure()
        if self._given_back:
            self._usual = max(self._usual, size)
            self._given_back = False
        elif size > self._usual * GROWTH:
            self.give_back()


HEAP = Heap()  # one for all models of the process
