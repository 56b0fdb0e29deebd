"""Looks at a worker's process from its own machine, without its help: its state, the stacks of its threads,
and how it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.rpc import host
from rlflow.processes.watchdog import kin, stacks

LEAVING_SECONDS = 2.0  # how long a process that was asked to end may take, before it is killed
GONE_SECONDS = 5.0  # how long a killed process may take to be gone
HOST = os.sep.join(host.__file__.split(os.sep)[-2:])  # end of the path of the host's file, on any machine


@dataclass(frozen=True)
class ProcessState:
    """How a process was found. Prints in words."""

    state: str  # the kernel's letter, T for stopped; empty for a process that is gone
    stacks: str = ""  # stacks of the threads that carry out calls

    def __str__(self) -> str:
        return {
            "": "has died",
            "T": "is stopped (SIGSTOP)",
            "t": "is stopped by a debugger",
            "D": "waits in the kernel for a device or a file",
        }.get(self.state, "lets none of its threads run")


def look(presence: ProcessInfo) -> ProcessState:
    """The state and stacks of a process. A stopped one is continued to write its stacks, since it will be
    killed anyway."""
    state = _state(presence)
    return ProcessState(state, _stacks(presence, state) if state else "")


def kill(presence: ProcessInfo) -> bool:
    """Kill the process. Gives whether it is gone."""
    _signal(presence, signal.SIGCONT)
    _signal(presence, signal.SIGKILL)
    return _until(lambda: presence.process.alive() is False, GONE_SECONDS)


def see_off(presence: ProcessInfo) -> bool:
    """Wait for the end of a process that Ray was told to end, and kill it if it stays. Gives whether it is
    gone. Killed at once, it would have Ray print a message about a dead worker."""
    return _until(lambda: presence.process.alive() is False, LEAVING_SECONDS) or kill(presence)


def _state(presence: ProcessInfo) -> str:
    status = kin.stat(presence.process.pid) if presence.process.alive() else None
    return status.state if status is not None else ""


def _signal(presence: ProcessInfo, number: int) -> None:
    if presence.process.alive():  # a pid alone may be somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(presence.process.pid, number)


def _stacks(presence: ProcessInfo, state: str) -> str:
    """The stacks of the threads that run a worker's method, down to that method."""
    if presence.stacks < 0:
        return ""
    if state == "T":
        _signal(presence, signal.SIGCONT)
    dump = stacks.written(presence.process.pid, presence.stacks)
    return stacks.shown(dump, lambda path, name: path.endswith(HOST) and name in host.CALLS)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True
