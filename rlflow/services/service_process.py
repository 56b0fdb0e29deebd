"""One process of a service: it is started in a session of its own with a mark, prints into a file, and is
ended with all that it started."""

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
from rlflow.processes.watchdog import kin

GRACE = 5.0  # seconds between the request to end and the end
LINES = 12  # last lines of a service's output that a message shows
BEGUN = "--- "  # begins the line that a start writes into the file
LONGEST = 1 << 16  # bytes after which a line of its output is cut in two
OUTPUT_SECONDS = 1.0  # for which the rest of its output is awaited once it has ended
TAIL = 8192  # bytes of its output in which they are looked for


class ServiceProcess:
    """A running process of a service."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str], run: str) -> None:
        """``variables``: of the environment, beside this process's own; ``run``: the name of the run in the
        mark of its processes. Raises OSError where the command cannot be started."""
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
        """The process id."""
        return self.child.pid

    def ended_within(self, seconds: float) -> int | None:
        """The exit code, negative for a signal's number, of a process that ends within so many seconds; None
        for one that does not."""
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._output.join(OUTPUT_SECONDS)  # where it has left no process that holds its output
        return code

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process and its group, also where it is stopped."""
        self.child.signal_group(signal.SIGTERM)
        self.child.signal_group(signal.SIGCONT)

    def end(self, seconds: float = 0.0) -> None:
        """Wait for the end for so many seconds, then kill the process; and whatever it has started."""
        self.ended_within(seconds)
        self.child.end()

    def worked(self) -> float:
        """Seconds of processor time that it and its children have used; 0 where it is gone."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total


def _keep(output: IO[bytes], file: IO[bytes]) -> None:
    """Write what a process prints into a file, line by line and without secrets, until nothing can print any
    more. A disk that is full loses lines, and ends no service."""
    mask = MaskedLines()

    def add(line: bytes) -> None:
        text = printable(mask(line.decode(errors="replace").rstrip("\r")))
        with contextlib.suppress(OSError):
            file.write(f"{text}\n".encode())

    lines = Lines(add, LONGEST)
    with output, file:
        while piece := os.read(output.fileno(), LONGEST):
            lines.hear(piece)
        lines.close()


def environment(variables: Mapping[str, str], run: str, mark: str) -> dict[str, str]:
    """The environment of a service: this process's, in which `python` and `rlflow` are those that run
    here."""
    names = os.environ.get(kin.MARK, "").split("/")
    marks = [name for name in (*names, *(() if run in names else (run,)), mark) if name]
    path = os.pathsep.join(
        filter(None, (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    )
    return {"PYTHONUNBUFFERED": "1", **os.environ, "PATH": path, **variables, kin.MARK: "/".join(marks)}


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path) -> str:
    """The last lines of a service's output, fit to be printed; empty where there are none."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL, 0))
            lines = printable(file.read().decode(errors="replace")).splitlines()
    except OSError:
        return ""
    printed = [line for line in lines if line.strip() and not line.startswith(BEGUN)]
    return "\n".join(printed[-LINES:])
