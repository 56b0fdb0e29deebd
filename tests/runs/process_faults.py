"""Process faults in runs started from a shell. Shared by the tests of how runs end and the benchmark of
faults."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from run_faults import MARK, Content, content, left_over

SECONDS = "FAULTY_SECONDS"  # an environment variable: the deadline of the faulty stage
FAULTY = str(Path(__file__).parent / "flows" / "faulty.py")
REWARD = '''
import os, subprocess, sys, time

CALLS = []

def judge(completion):
    """In its fifth call it does what no reward should."""
    CALLS.append(1)
    if len(CALLS) == 5:
        ACTIONS[{action!r}]()
    return float(completion.split(".")[0])

def returns(): os.fork()
def exits():
    if os.fork() == 0: sys.exit(0)
def child(): subprocess.Popen(["sleep", "600"])
def daemon(): subprocess.run(["sh", "-c", "setsid sleep 600 >&- 2>&- &"], check=True)

ACTIONS = {"": lambda: None, "returns": returns, "exits": exits, "child": child, "daemon": daemon,
           "leaves all": lambda: (child(), daemon())}
'''


@dataclass
class Launched:
    """A run in a process of its own. ``terminal``: the other end of its terminal, if it has one."""

    folder: Path
    name: str
    pid: int
    mark: str
    terminal: int | None = None
    said: bytes = field(default=b"")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def driver(self) -> int:
        """Return the process that does the work, a child of the started one."""
        return int(self.status["process"]["pid"])

    @property
    def status(self) -> dict:
        return json.loads((self.run / "status.json").read_text())

    def iterations(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def reaches(self, iterations: int, seconds: float = 120.0) -> None:
        """Wait until the run has done this many iterations."""
        limit = time.monotonic() + seconds
        while self.iterations() < iterations:
            self._hear(0.02)
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.name} has done {self.iterations()} iterations: {self.output()}")

    def ended(self, seconds: float = 60.0) -> int:
        """Wait for the run and return its exit code; negative: the signal that ended it."""
        limit = time.monotonic() + seconds
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            self._hear(0.02)
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"{self.name} goes on: {self.output()}")
        self._hear(0.1)
        return os.waitstatus_to_exitcode(found[1])

    def output(self) -> str:
        path = self.folder / f"{self.name}.said"
        return (path.read_bytes() if path.exists() else self.said).decode(errors="replace")

    def left(self) -> list[int]:
        """Return the run's processes that still exist."""
        return left_over(self.mark)

    def hang_up(self) -> None:
        assert self.terminal is not None
        os.close(self.terminal)
        self.terminal = None

    def _hear(self, seconds: float) -> None:
        """Read the run's terminal output, so that the terminal never fills up."""
        if self.terminal is None:
            time.sleep(seconds)
        elif select.select([self.terminal], [], [], seconds)[0]:
            try:
                self.said += os.read(self.terminal, 1 << 16)
            except OSError:  # the run closed its end of the terminal
                time.sleep(seconds)


def launch(
    folder: Path,
    name: str,
    *flags: object,
    iterations: int = 6,
    save_every: int = 1,
    fault: str = "",
    reward: str = "",
    terminal: bool = False,
) -> Launched:
    """Start `rlflow run` of the faulty flow, or of the flow that ``flags`` start with."""
    given = words(
        folder, name, *flags, iterations=iterations, save_every=save_every, fault=fault, reward=reward
    )
    return started(folder, name, [sys.executable, "-m", "rlflow.cli.main", *given], terminal)


def words(
    folder: Path,
    name: str,
    *flags: object,
    iterations: int = 6,
    save_every: int = 1,
    fault: str = "",
    reward: str = "",
) -> list[str]:
    """Write the reward file and return the words after `rlflow` in the command line of ``launch``."""
    judge = folder / f"{name}.judge.py"
    judge.write_text(REWARD.replace("{action!r}", repr(reward)))
    given = [
        "run",
        FAULTY,
        "--backend",
        "null",
        "--prompts",
        4,
        "--held-out",
        0,
        "--threads",
        1,
        "--out",
        folder / "runs",
        "--name",
        name,
        "--hp.once",
        folder / f"{name}.once",
        *(["--hp.fault", fault] if fault else []),
        "--reward",
        f"{judge}:judge",
        "--iterations",
        iterations,
        "--save-every",
        save_every,
        *flags,
    ]
    return list(map(str, given))


def started(folder: Path, name: str, words: list[str], terminal: bool = False) -> Launched:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark}
    if terminal:
        pid, end = pty.fork()
        if pid == 0:
            os.execve(words[0], words, environment)
        return Launched(folder, name, pid, mark, end)
    with open(folder / f"{name}.said", "wb") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=environment, start_new_session=True)
    process.returncode = 0  # waited for by its process id
    return Launched(folder, name, process.pid, mark)


def came_to(folder: Path) -> Content:
    """Return what must be equal in runs whose settings select a fault."""
    found = content(folder)
    return replace(found, state={name: value for name, value in found.state.items() if name != "graph"})


def resumed(run: Launched) -> Launched:
    """Resume the run in a process of its own."""
    return started(run.folder, run.name, [sys.executable, "-m", "rlflow.cli.main", "resume", str(run.run)])
