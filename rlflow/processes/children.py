"""A child of this process that is ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from rlflow.processes.watchdog import kin


class Child(subprocess.Popen[bytes]):
    """A process in a session of its own, so that signals of a terminal do not reach it. ``mark``: the name in
    the run's mark by which all that it starts is found; empty for a program that starts nothing. ``options``:
    as of ``subprocess.Popen``. A program that shall not outlive this process calls `kin.die_with`, or ends
    when its standard input does."""

    def __init__(self, command: Sequence[str], mark: str = "", **options: Any) -> None:
        self._mark, self._below = mark, list[kin.Known]()
        super().__init__(command, start_new_session=True, **options)

    def note_descendants(self) -> None:
        """Note what it has started, so that ``end`` ends it even without the mark. Once the process has
        ended, nothing can be noted."""
        if self.returncode is None:
            self._below += kin.descendants(self.pid)

    def signal_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process and its group, from any thread."""
        if self.returncode is None:
            self._signal(number)

    def end(self) -> None:
        """Kill the process and all that it has started, also in other sessions, and wait until it is gone."""
        self._signal(signal.SIGKILL)  # the group outlives its leader while it has members
        self.wait()
        kin.end_all(lambda: [*(kin.marked(self._mark) if self._mark else ()), *kin.still(self._below)])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
