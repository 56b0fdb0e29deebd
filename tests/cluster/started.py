"""Processes that tests start, found by their mark."""

import time
from pathlib import Path


def marked(mark):
    """Return the processes that have this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            # empty for a process that waits to be reaped
            name = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if name and mark in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {name[:250].decode()}")
        except OSError:
            continue
    return found


def until(condition, seconds):
    """Return the value of the condition when it holds, or at the deadline."""
    limit = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < limit:
        time.sleep(0.05)
    return found
