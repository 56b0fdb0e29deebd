"""A clock that stops while one of the run's services restarts.

Requests to services use it for their deadlines, so they can wait for a restart. During an outage, the run
writes to a file when the service failed and by when its restart must succeed. The path of this file is in an
environment variable, so that every process the run started can read it.
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
    """Return the monotonic time in seconds, minus all outages of the run's services."""
    now = time.monotonic()
    path = os.environ.get(VARIABLE)
    past, since, until = _read(path) if path else (0.0, 0.0, 0.0)
    return now - past - max(min(now, until) - since, 0.0)


def _read(path: str) -> tuple[float, float, float]:
    """Return (total length of past outages, start of the current outage, its latest end), in seconds.

    All are 0 if there was no outage, or if the file is from another machine, whose clock is different.
    """
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        machine, *seconds = file.read().split()
        past, since, until = map(float, seconds)
        return (past, since, until) if machine == _machine() else (0.0, 0.0, 0.0)
    return 0.0, 0.0, 0.0


@cache
def _machine() -> str:
    """Return a string that identifies this machine and its current boot."""
    return boot() or os.uname().nodename


class Outages:
    """Writes the outage file. Only one process may write it, and only one of its threads at a time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._past = self._since = self._until = 0.0

    def last_until(self, second: float) -> None:
        """Record that an outage ends by ``second`` on the monotonic clock at the latest.

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
