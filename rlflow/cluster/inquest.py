"""A worker's process seen from its own machine: what keeps it, where its threads are, and its end. Nothing here needs its help."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlflow.cluster.pulse import Presence

DUMP_SECONDS = 2.0  # how long stacks may take to be written
LEAVING_SECONDS = 2.0  # how long a process that was asked to end may take, before it is killed
GONE_SECONDS = 5.0  # how long a killed process may take to be gone
FRAMES = 8  # of a stack that are shown
METHOD = re.compile("do|make")  # of a worker's host, within which its own begins
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Found:
    """state: the kernel's letter, T for stopped, empty for a process that is gone. stacks: of threads that carry out calls."""

    state: str
    stacks: str = ""

    def __str__(self) -> str:
        return {"": "has died", "T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger",
                "D": "waits in the kernel for a device or a file"}.get(self.state, "lets none of its threads run")  # fmt: skip


def look(presence: Presence) -> Found:
    """A stopped process goes on while its stacks are written: it is to be ended anyway."""
    state = _state(presence)
    return Found(state, _stacks(presence, state) if state else "")


def kill(presence: Presence) -> bool:
    """Kill the process; whether it is gone."""
    _signal(presence, signal.SIGCONT)
    _signal(presence, signal.SIGKILL)
    return _until(lambda: presence.process.alive() is False, GONE_SECONDS)


def see_off(presence: Presence) -> bool:
    """The same for a process that Ray has been told to end: had it been killed before Ray saw to it, Ray would tell the terminal of a
    worker that died."""
    return _until(lambda: presence.process.alive() is False, LEAVING_SECONDS) or kill(presence)


def _state(presence: Presence) -> str:
    if not presence.process.alive():
        return ""
    try:
        return Path(f"/proc/{presence.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _signal(presence: Presence, number: int) -> None:
    if presence.process.alive():  # a pid alone may be somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(presence.process.pid, number)


def _stacks(presence: Presence, state: str) -> str:
    file = Path(f"/proc/{presence.process.pid}/fd/{presence.stacks}")
    try:
        if presence.stacks < 0:
            return ""
        before = file.stat().st_size
        _signal(presence, signal.SIGUSR2)
        if state == "T":
            _signal(presence, signal.SIGCONT)
        _written(file, before)
        return shown(file.read_bytes()[before:].decode(errors="replace"))
    except OSError:
        return ""


def _written(file: Path, before: int) -> None:
    """Wait until the file has grown and grows no more."""
    last = before

    def settled() -> bool:
        nonlocal last
        earlier, last = last, file.stat().st_size
        return before < earlier == last

    _until(settled, DUMP_SECONDS)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def shown(dump: str) -> str:
    """The stacks of the threads that carry out calls, the innermost frames first; of the others none."""
    return "\n".join(line for frames in _threads(dump) for line in frames)


def _threads(dump: str) -> Iterator[list[str]]:
    """From faulthandler's output, for each thread that runs a method of a worker, its frames within that."""
    for thread in re.split(r"\n(?=(?:Current )?[Tt]hread )", dump):
        frames = [found.groups() for line in thread.splitlines() if (found := FRAME.match(line))]
        outer = next((i for i, (path, _, name) in enumerate(frames) if path.endswith("cluster/host.py") and METHOD.match(name)), None)
        if outer is not None:
            yield [f"    {_short(path)}:{line} in {name}" for path, line, name in frames[:outer][:FRAMES]]


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-3:])
