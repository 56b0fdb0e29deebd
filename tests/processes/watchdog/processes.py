"""Ways to wait for processes."""

import contextlib
import os
import select
import time


def gone(pid, seconds=10.0):
    """Return True if a process ends within this many seconds; a process that waits to be reaped has ended."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)
    return True


def until(condition, seconds=240.0):
    """Wait until the condition holds and return its value."""
    limit = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert found
    return found
