"""Child: a child process that can be ended together with all its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from rlflow.processes.watchdog import process_tag


class Child(subprocess.Popen[bytes]):
    """A child process in its own session, so that it does not get signals from the terminal.

    ``mark``: a name that is added to the run's process tag, and with which ``end`` finds descendants; leave
    it empty for a program without descendants. ``options``: options of ``subprocess.Popen``. The child does
    not end automatically with this process. For this, its program must call `process_tag.die_with`, or end
    when its standard input is closed.
    """

    def __init__(self, command: Sequence[str], mark: str = "", **options: Any) -> None:
        self._mark, self._below = mark, list[process_tag.Known]()
        super().__init__(command, start_new_session=True, **options)

    def note_descendants(self) -> None:
        """Record the current descendants, so that ``end`` also kills descendants without the process tag.

        If the process has ended, do nothing.
        """
        if self.returncode is None:
            self._below += process_tag.descendants(self.pid)

    def signal_group(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process and its process group. Any thread may call this."""
        if self.returncode is None:
            self._signal(number)

    def end(self) -> None:
        """Kill the process and all its descendants, and wait until they have ended.

        This includes descendants in other sessions.
        """
        self._signal(signal.SIGKILL)  # the group exists as long as it has members, even without its leader
        self.wait()
        process_tag.end_all(
            lambda: [*(process_tag.marked(self._mark) if self._mark else ()), *process_tag.still(self._below)]
        )

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
