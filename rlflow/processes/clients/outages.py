"""A clock that pauses while a service of the run restarts.

Requests to services use this clock for their deadlines, so that they can wait for a restart. During an
outage, the run writes two times into a file: when the service failed, and by when its restart must succeed.
An environment variable has the path of this file, so that every process started by the run can read it.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

from rlflow.processes.process import boot

VARIABLE = "RLFLOW_OUTAGES"  # the variable that contains the path of the file


def clock() -> float:
    """Return the time of the monotonic clock in seconds, minus all outages of the run's services."""
    now = time.monotonic()
    path = os.environ.get(VARIABLE)
    past, since, until = _read(path) if path else (0.0, 0.0, 0.0)
    return now - past - max(min(now, until) - since, 0.0)


def _read(path: str) -> tuple[float, float, float]:
    """Return three times from the outage file, in seconds.

    They are the total length of past outages, the start of the current outage, and its latest end. All are 0
    if there was no outage, or if the file was written on another machine, whose clock differs.
    """
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        machine, *seconds = file.read().split()
        past, since, until = map(float, seconds)
        return (past, since, until) if machine == _machine() else (0.0, 0.0, 0.0)
    return 0.0, 0.0, 0.0


@cache
def _machine() -> str:
    """Return a string that identifies this machine and its last boot."""
    return boot() or os.uname().nodename


class Outages:
    """Writes the outage file. Only one process, and only one of its threads at a time, may write the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._past = self._since = self._until = 0.0

    def last_until(self, second: float) -> None:
        """Record that an outage lasts at most until the time ``second`` of the monotonic clock.

        0 means that all services are available. Raises OSError.
        """
        now = time.monotonic()
        if self._until and not second:
            self._past += max(min(now, self._until) - self._since, 0.0)
        if second and not self._until:
            self._since = now
        changed = second != self._until
        self._until = second
        self._since = self._since if second else 0.0
        if changed:
            self._write()

    def _write(self) -> None:
        beside = self.file.with_suffix(".new")
        beside.write_text(f"{_machine()} {self._past!r} {self._since!r} {self._until!r}")
        os.replace(beside, self.file)
