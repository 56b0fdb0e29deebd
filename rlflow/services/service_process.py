"""One process of a service.

It runs in its own session, carries a process tag, and writes its output to a file. All its child processes
end with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from rlflow.errors import printable
from rlflow.monitoring.lines import Lines
from rlflow.monitoring.secrets import MaskedLines
from rlflow.processes.children import Child
from rlflow.processes.watchdog import process_tag

GRACE = 5.0  # seconds between the request to end and the kill
LINES = 12  # last lines of a service's output that a message shows
BEGUN = "--- "  # prefix of the line that each start writes into the file
LONGEST = 1 << 16  # maximum size of a line of the output in bytes; longer lines are split
OUTPUT_SECONDS = 1.0  # most seconds to wait for the rest of the output after the process has ended
TAIL = 8192  # last bytes of the output in which these lines are searched


class ServiceProcess:
    """A service's process, started when this object is made."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str], run: str) -> None:
        """Start the process.

        ``log``: the file for its output. ``variables``: environment variables to add to this process's own.
        ``run``: the run's name, for the process tag. Raises OSError if the command can't be started.
        """
        mark = secrets.token_hex(8)
        self.began = time.monotonic()
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(log, "ab", buffering=0))
            file.write(f"{BEGUN}{time.strftime('%Y-%m-%d %H:%M:%S')} started\n".encode())
            self.child = Child(
                command,
                mark,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(variables, run, mark),
            )
            opened.pop_all()
        assert self.child.stdout is not None
        self._output = threading.Thread(
            target=_keep, args=(self.child.stdout, file), name="output of a service", daemon=True
        )
        self._output.start()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self.child.pid

    def ended_within(self, seconds: float) -> int | None:
        """Wait up to ``seconds`` for the process to end. Return its exit code, or None if it is still
        running.

        If a signal ended the process, the code is the signal's negative number.
        """
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._output.join(OUTPUT_SECONDS)  # a child process may keep the output open, so wait only briefly
        return code

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process and its group. If the process is suspended, it is resumed."""
        self.child.signal_group(signal.SIGTERM)
        self.child.signal_group(signal.SIGCONT)

    def end(self, seconds: float = 0.0) -> None:
        """Wait up to ``seconds`` for the process to end, then kill it and all its child processes."""
        self.ended_within(seconds)
        self.child.end()

    def worked(self) -> float:
        """Return the CPU seconds used by the process and its children, or 0 if it has ended."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total


def _keep(output: IO[bytes], file: IO[bytes]) -> None:
    """Copy a process's output to a file line by line, with secrets masked, until the output is closed.

    If the disk is full, lines are lost but the service keeps running.
    """
    mask = MaskedLines()

    def add(line: bytes) -> None:
        text = printable(mask(line.decode(errors="replace").rstrip("\r")))
        with contextlib.suppress(OSError):
            file.write(f"{text}\n".encode())

    lines = Lines(add, LONGEST)
    with output, file:
        while piece := os.read(output.fileno(), LONGEST):
            lines.on_output(piece)
        lines.close()


def environment(variables: Mapping[str, str], run: str, mark: str) -> dict[str, str]:
    """Return the environment variables for a service's process.

    These are this process's own variables plus ``variables``. PATH starts with the folder of this `python`
    and `rlflow`. ``run``, ``mark``: names for the process tag.
    """
    names = os.environ.get(process_tag.MARK, "").split("/")
    marks = [name for name in (*names, *(() if run in names else (run,)), mark) if name]
    path = os.pathsep.join(
        filter(None, (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    )
    return {
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PATH": path,
        **variables,
        process_tag.MARK: "/".join(marks),
    }


def ending(code: int) -> str:
    """Describe how a process ended.

    ``code``: its exit code or, if a signal ended it, the signal's negative number.
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path) -> str:
    """Return the last lines of a service's log with control characters escaped, or "" if there are none."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL, 0))
            lines = printable(file.read().decode(errors="replace")).splitlines()
    except OSError:
        return ""
    printed = [line for line in lines if line.strip() and not line.startswith(BEGUN)]
    return "\n".join(printed[-LINES:])
