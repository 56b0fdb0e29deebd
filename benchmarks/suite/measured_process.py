"""Control a cell's process: requests with a deadline, resource use, and shutdown."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rlflow.benchmarks import child
from rlflow.checkpoints import durable
from rlflow.monitoring.secrets import MaskedLines, masked
from rlflow.processes.watchdog import process_tag

LAST_LINES = 15  # lines of the cell's log that are quoted in the cause of a failure
CLOSE_SECONDS = 30.0


class CellFailed(Exception):
    """A cell did not answer, or answered with an error. The message names the cause."""


class Use(NamedTuple):
    """Resources used by a cell's process and its descendants."""

    processor: float  # CPU seconds used since the processes started
    # peak bytes so far: private memory plus each process's share of shared memory (PSS)
    memory: int


class CellProcess:
    """A cell that runs in its own process, which may have another interpreter.

    ``python``: the interpreter. ``file``: the file that defines the system. ``log``: the file for the
    process's output. ``deadline``: maximum number of seconds for an answer.
    """

    def __init__(self, python: str, file: Path, log: Path, deadline: float) -> None:
        self.deadline, self.log = deadline, log
        with log.open("a") as opened:
            command = [python, "-P", child.__file__, str(file), process_tag.__file__, str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=opened,
                text=True,
                start_new_session=True,
                env=environment(python),
            )
        self._below: list[process_tag.Known] = []
        # True while the process works on a request; it does not notice then that its input was closed
        self._busy = False

    def ask(self, do: str, **values: Any) -> Any:
        """Send a request and return the answer.

        ``do``: name of the system's method. Raises CellFailed if the answer is an error, if the process has
        ended, or after the deadline.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._busy = True
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **values}), file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], self.deadline)
        line = self.process.stdout.readline() if ready else ""
        self._busy = False
        if not line:
            if not ready:
                self.process.kill()  # nobody would read a later answer
            cause = (
                f"its process ended with code {self.process.wait()}"
                if ready
                else f"no answer to '{do}' within {self.deadline:g} s"
            )
            raise CellFailed(f"{cause}; last lines of {self.log}:\n{self._last_lines()}")
        reply = json.loads(line)
        if "error" in reply:
            raise CellFailed(masked(reply["error"]))
        return reply["value"]

    def use(self) -> Use:
        """Measure the resources that the cell's processes have used.

        If a process starts and ends between two calls, only its CPU time counts, and only if its parent
        waited for it. Memory is the sum over the running processes of the present use, with shared memory in
        proportion, and the difference between peak and present size. With several processes this is an upper
        bound, because their peaks may be at different times.
        """
        processor, memory = 0.0, 0
        self._below = process_tag.descendants(self.process.pid)
        for pid in [self.process.pid, *(pid for pid, _ in self._below)]:
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                # user and system time, of the process and of its children that have ended
                processor += sum(one.cpu_times()[:4])
                memory += one.memory_full_info().pss + given_back(pid)
        return Use(processor, memory)

    def close(self) -> None:
        """End the process and all processes that it started. A request in progress is cut off."""
        self._below = process_tag.descendants(self.process.pid)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self._busy else CLOSE_SECONDS)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        limit = time.monotonic() + CLOSE_SECONDS  # the run's watchdog ends its remaining processes
        while process_tag.still(self._below) and time.monotonic() < limit:
            time.sleep(0.05)
        process_tag.end_all(lambda: process_tag.still(self._below))
        with contextlib.suppress(OSError):  # the comparison's folder may have been deleted
            durable.replace(self.log, "".join(f"{line}\n" for line in self._lines()).encode(), flush=False)

    def _last_lines(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._lines()[-LAST_LINES:])
        return ""

    def _lines(self) -> list[str]:
        """Return the lines that the process has printed, with secrets masked. Raises OSError."""
        return list(map(MaskedLines(), self.log.read_text(errors="replace").splitlines()))


def given_back(pid: int) -> int:
    """Return how many bytes below its peak the memory of a process is (Linux); 0 if unknown."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes = {
            words[0]: int(words[1]) << 10 for words in lines if words and words[0] in ("VmHWM:", "VmRSS:")
        }
        return max(sizes["VmHWM:"] - sizes["VmRSS:"], 0)
    return 0


def environment(python: str) -> dict[str, str]:
    """Return the environment variables for a cell.

    A cell with another interpreter does not get PYTHONPATH.
    """
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python != sys.executable:
        variables.pop("PYTHONPATH", None)
    return variables
