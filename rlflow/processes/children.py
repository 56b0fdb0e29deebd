"""Child: a child process that is ended together with all its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from rlflow.processes.watchdog import process_tag


class Child(subprocess.Popen[bytes]):
    """A process in its own session, so that signals from a terminal do not reach it.

    ``mark``: a name added to the run's process tag, which is used to find the process's descendants; empty
    for a program without descendants. ``options``: options of ``subprocess.Popen``. A program that must not
    outlive this process has to call `process_tag.die_with`, or to end when its standard input is closed.
    """

    def __init__(self, command: Sequence[str], mark: str = "", **options: Any) -> None:
        self._mark, self._below = mark, list[process_tag.Known]()
        super().__init__(command, start_new_session=True, **options)

    def note_descendants(self) -> None:
        """Record the present descendants, so that ``end`` also ends those without the process tag.

        Does nothing once the process has ended.
        """
        if self.returncode is None:
            self._below += process_tag.descendants(self.pid)

    def signal_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process and its group. Any thread may call this."""
        if self.returncode is None:
            self._signal(number)

    def end(self) -> None:
        """Kill the process and all its descendants, including those in other sessions, and wait until they
        have ended."""
        self._signal(signal.SIGKILL)  # the group exists as long as it has members, even without its leader
        self.wait()
        process_tag.end_all(
            lambda: [*(process_tag.marked(self._mark) if self._mark else ()), *process_tag.still(self._below)]
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
