"""Waiting for processes, as several tests do."""

import contextlib
import os
import select
import time


def gone(pid, seconds=10.0):
    """Whether a process ends within so many seconds; one that waits to be collected has ended."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)
    return True


def until(condition, seconds=240.0):
    """What the condition gives once it holds."""
    limit = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert found
    return found
