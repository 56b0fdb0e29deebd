"""The process of a cell, seen from the comparison: requests with a deadline, what its processes use, and
their end."""

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
from rlflow.processes.watchdog import kin

LAST_LINES = 15  # of a cell's log, in the cause of its failure
CLOSE_SECONDS = 30.0


class CellFailed(Exception):
    """A cell gave no answer, or an error. The text is the cause."""


class Use(NamedTuple):
    """The use of a cell's processes, of those that it started too."""

    processor: float  # seconds of processor time since they began
    # the most bytes so far: those that are theirs alone, with their share of what they have in common
    memory: int


class CellProcess:
    """A cell that runs in a process of its own, with an interpreter of its own where it needs one.

    python: the interpreter; file: that defines the system; log: takes what it prints."""

    def __init__(self, python: str, file: Path, log: Path, deadline: float) -> None:
        self.deadline, self.log = deadline, log
        with log.open("a") as opened:
            command = [python, "-P", child.__file__, str(file), kin.__file__, str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=opened,
                text=True,
                start_new_session=True,
                env=environment(python),
            )
        self._below: list[kin.Known] = []
        self._busy = False  # with a request, so that it would not notice that there are no more

    def ask(self, do: str, **values: Any) -> Any:
        """The answer to a request. Raises CellFailed for an error, a process that ended, and a deadline that
        passed."""
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
                self.process.kill()  # nothing that it does would be waited for
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
        """Measure what its processes have used. Those that came and went between two calls are counted where
        a parent waited for them, in processor time alone. Memory is what they have now, and what each had
        more when it had most: of several processes these times may differ, so that it is then an upper
        bound."""
        processor, memory = 0.0, 0
        self._below = kin.descendants(self.process.pid)
        for pid in [self.process.pid, *(pid for pid, _ in self._below)]:
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                # user and system time, its own and its ended children's
                processor += sum(one.cpu_times()[:4])
                memory += one.memory_full_info().pss + given_back(pid)
        return Use(processor, memory)

    def close(self) -> None:
        """End it and all that it started: in the middle of a request, where the comparison is stopped, at
        once."""
        self._below = kin.descendants(self.process.pid)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self._busy else CLOSE_SECONDS)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        limit = time.monotonic() + CLOSE_SECONDS  # the watchdog of a run ends what is left of it
        while kin.still(self._below) and time.monotonic() < limit:
            time.sleep(0.05)
        kin.end_all(lambda: kin.still(self._below))
        with contextlib.suppress(OSError):  # the comparison's folder may be gone
            durable.replace(self.log, "".join(f"{line}\n" for line in self._lines()).encode(), flush=False)

    def _last_lines(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._lines()[-LAST_LINES:])
        return ""

    def _lines(self) -> list[str]:
        """What it has printed, without secrets. Raises OSError."""
        return list(map(MaskedLines(), self.log.read_text(errors="replace").splitlines()))


def given_back(pid: int) -> int:
    """The bytes by which a process's memory is smaller than it once was (Linux); 0 where that is not
    known."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes = {
            words[0]: int(words[1]) << 10 for words in lines if words and words[0] in ("VmHWM:", "VmRSS:")
        }
        return max(sizes["VmHWM:"] - sizes["VmRSS:"], 0)
    return 0


def environment(python: str) -> dict[str, str]:
    """The variables of a cell: of another interpreter without what leads to this one's packages."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python != sys.executable:
        variables.pop("PYTHONPATH", None)
    return variables
