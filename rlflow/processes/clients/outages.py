"""A clock that pauses while a service of the run restarts.

Deadlines of requests to services use this clock, so that a request waits for a restarting service. During an
outage, the run writes two times into a file: the time at which the service failed, and the time by which its
restart must succeed. Every process that the run starts finds the path of this file in an environment
variable, and reads the file.
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
    """Return the seconds of the monotonic clock, minus the outages of the run's services."""
    now = time.monotonic()
    path = os.environ.get(VARIABLE)
    past, since, until = _read(path) if path else (0.0, 0.0, 0.0)
    return now - past - max(min(now, until) - since, 0.0)


def _read(path: str) -> tuple[float, float, float]:
    """Return (seconds of past outages, start of the present outage, latest end of the present outage).

    All are 0 if there was no outage, or if the file was written on another machine, whose clock differs.
    """
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        machine, *seconds = file.read().split()
        past, since, until = map(float, seconds)
        return (past, since, until) if machine == _machine() else (0.0, 0.0, 0.0)
    return 0.0, 0.0, 0.0


@cache
def _machine() -> str:
    """Return a text that identifies this machine and its last start."""
    return boot() or os.uname().nodename


class Outages:
    """Writes the outage file. Only one process, and only one thread at a time, may write it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._past = self._since = self._until = 0.0

    def last_until(self, second: float) -> None:
        """Record the latest time on the monotonic clock at which a service is available again; 0 if no
        service is unavailable.

        Raises OSError.
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
