"""A worker's process seen from its own machine: what keeps it, where its threads are, and its end. Nothing here needs its help."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.rpc import actor as host
from rlflow.watchdog import kin, stacks

LEAVING_SECONDS = 2.0  # how long a process that was asked to end may take, before it is killed
GONE_SECONDS = 5.0  # how long a killed process may take to be gone
HOST = os.sep.join(host.__file__.split(os.sep)[-2:])  # wherever a worker has it


@dataclass(frozen=True)
class ProcessState:
    """state: the kernel's letter, T for stopped, empty for a process that is gone. stacks: of threads that carry out calls."""

    state: str
    stacks: str = ""

    def __str__(self) -> str:
        return {"": "has died", "T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger",
                "D": "waits in the kernel for a device or a file"}.get(self.state, "lets none of its threads run")  # fmt: skip


def look(presence: ProcessInfo) -> ProcessState:
    """A stopped process goes on while its stacks are written: it is to be ended anyway."""
    state = _state(presence)
    return ProcessState(state, _stacks(presence, state) if state else "")


def kill(presence: ProcessInfo) -> bool:
    """Kill the process; whether it is gone."""
    _signal(presence, signal.SIGCONT)
    _signal(presence, signal.SIGKILL)
    return _until(lambda: presence.process.alive() is False, GONE_SECONDS)


def see_off(presence: ProcessInfo) -> bool:
    """The same for a process that Ray has been told to end: had it been killed before Ray saw to it, Ray would tell the terminal of a
    worker that died."""
    return _until(lambda: presence.process.alive() is False, LEAVING_SECONDS) or kill(presence)


def _state(presence: ProcessInfo) -> str:
    found = kin.stat(presence.process.pid) if presence.process.alive() else None
    return found.state if found is not None else ""


def _signal(presence: ProcessInfo, number: int) -> None:
    if presence.process.alive():  # a pid alone may be somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(presence.process.pid, number)


def _stacks(presence: ProcessInfo, state: str) -> str:
    """Of threads that run a method of a worker, its frames within that."""

    def ask() -> None:
        _signal(presence, signal.SIGUSR2)
        if state == "T":
            _signal(presence, signal.SIGCONT)

    dump = stacks.written(presence.process.pid, presence.stacks, ask) if presence.stacks >= 0 else ""
    return stacks.shown(dump, lambda path, name: path.endswith(HOST) and name in host.CALLS)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True
