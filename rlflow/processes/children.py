"""A child process that can be ended together with all its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from rlflow.processes.watchdog import process_tag


class Child(subprocess.Popen[bytes]):
    """A child process in its own session, so that signals from the terminal don't reach it.

    ``mark``: a name that is added to the run's process tag and lets ``end`` find descendants; leave it empty
    for a program without any. ``options`` are passed to ``subprocess.Popen``. The child can outlive this
    process unless its program calls `process_tag.die_with` or exits when its standard input is closed.
    """

    def __init__(self, command: Sequence[str], mark: str = "", **options: Any) -> None:
        self._mark, self._below = mark, list[process_tag.Known]()
        super().__init__(command, start_new_session=True, **options)

    def note_descendants(self) -> None:
        """Remember the current descendants, so that ``end`` also kills those without the process tag.

        Does nothing if the process has ended.
        """
        if self.returncode is None:
            self._below += process_tag.descendants(self.pid)

    def signal_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process and its process group. Can be called from any thread."""
        if self.returncode is None:
            self._signal(number)

    def end(self) -> None:
        """Kill the process and all its descendants, even in other sessions, and wait until they are gone."""
        self._signal(signal.SIGKILL)  # the group exists as long as it has members, even without its leader
        self.wait()
        process_tag.end_all(
            lambda: [*(process_tag.marked(self._mark) if self._mark else ()), *process_tag.still(self._below)]
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
