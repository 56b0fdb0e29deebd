"""Seconds in which no service of the run is being started anew. Deadlines of whatever asks services count
these seconds alone, so that a question waits for a service that comes back.

The run writes into a file when a service went away and until when it may take to come back. Every process
that the run starts finds the file by a variable of its environment, and reads it.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

from rlflow.processes.process import boot

VARIABLE = "RLFLOW_OUTAGES"  # the variable with the path of the file


def clock() -> float:
    """Seconds of the monotonic clock, less those of outages of the run's services."""
    now = time.monotonic()
    path = os.environ.get(VARIABLE)
    past, since, until = _read(path) if path else (0.0, 0.0, 0.0)
    return now - past - max(min(now, until) - since, 0.0)


def _read(path: str) -> tuple[float, float, float]:
    """Seconds of past outages, and of the present one when it began and when it ends at the latest; zeros if
    there was none, or another machine, whose clock is another, has written the file."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        machine, *seconds = file.read().split()
        past, since, until = map(float, seconds)
        return (past, since, until) if machine == _machine() else (0.0, 0.0, 0.0)
    return 0.0, 0.0, 0.0


@cache
def _machine() -> str:
    """What tells this machine, since it was started, from others."""
    return boot() or os.uname().nodename


class Outages:
    """What the file says. One process writes it, one thread at a time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._past = self._since = self._until = 0.0

    def last_until(self, second: float) -> None:
        """A service is away now and comes back by this second of the monotonic clock; 0 if none is away.
        Raises OSError."""
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
