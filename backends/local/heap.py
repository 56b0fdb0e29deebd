"""Return freed memory of this process to the system if it accumulates.

A step's activations are freed at its end, and the next step allocates others of other sizes. Small objects
that stay between them fragment the memory. The C library can then reuse ever fewer of its free pieces, and a
process that returns nothing grows with each step. Returning all memory after each step would take 10 to 20 %
of the time, because the kernel clears each page that is requested again. Therefore memory is returned at most
once per iteration, before a pass whose graph is kept for an update, and otherwise only if the process has
grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH = 1.1  # relative to the process size after a step that began with all freed memory returned


def resident() -> int:
    """Return the bytes of memory of this process; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back() -> None:
    """Return complete pages of freed memory to the system, if the C library is glibc."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Returns freed memory to the system, on request and if the process has grown by a tenth.

    measure: returns the bytes of the process. release: returns freed memory to the system."""

    def __init__(
        self, measure: Callable[[], int] = resident, release: Callable[[], None] = give_back
    ) -> None:
        self._measure, self._release = measure, release
        self._usual = 0  # largest size after a step that began with all freed memory returned
        self._given_back = True

    def give_back(self) -> None:
        """Return freed memory now."""
        self._release()
        self._given_back = True

    def step_ended(self) -> None:
        """Measure the process after an optimizer step, and return memory if it has grown."""
        size = self._measure()
        if self._given_back:
            self._usual = max(self._usual, size)
            self._given_back = False
        elif size > self._usual * GROWTH:
            self.give_back()


HEAP = Heap()  # one for all models of the process
