"""Examine and kill a worker's process from the same machine, without the process's help.

The examination returns the state of the process and its threads' stacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.rpc import host
from rlflow.processes.watchdog import process_tag, stacks

LEAVING_SECONDS = 2.0  # time for a process to end by itself, before it is killed
GONE_SECONDS = 5.0  # time for a killed process to end
HOST = os.sep.join(host.__file__.split(os.sep)[-2:])  # end of the path of the host's file, on any machine


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, which ``str()`` describes in words."""

    state: str  # the kernel's letter, T for stopped; empty for a process that has ended
    stacks: str = ""  # stacks of the threads that run calls

    def __str__(self) -> str:
        return {
            "": "has died",
            "T": "is stopped (SIGSTOP)",
            "t": "is stopped by a debugger",
            "D": "waits in the kernel for a device or a file",
        }.get(self.state, "is alive but not responding")


def look(presence: ProcessInfo) -> ProcessState:
    """Return the state of a process and its threads' stacks.

    A stopped process is resumed, because it can't write its stacks otherwise. So use this only on a process
    that will be killed.
    """
    state = _state(presence)
    return ProcessState(state, _stacks(presence, state) if state else "")


def kill(presence: ProcessInfo) -> bool:
    """Kill a worker's process, and return whether it has ended."""
    _signal(presence, signal.SIGCONT)
    _signal(presence, signal.SIGKILL)
    return _until(lambda: presence.process.alive() is False, GONE_SECONDS)


def wait_or_kill(presence: ProcessInfo) -> bool:
    """Wait for a process that Ray was asked to end, and kill it if it takes too long.

    Returns whether it has ended. Killing it at once would make Ray print a message about a dead worker.
    """
    return _until(lambda: presence.process.alive() is False, LEAVING_SECONDS) or kill(presence)


def _state(presence: ProcessInfo) -> str:
    status = process_tag.stat(presence.process.pid) if presence.process.alive() else None
    return status.state if status is not None else ""


def _signal(presence: ProcessInfo, number: int) -> None:
    if presence.process.alive():  # the pid may belong to another process by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(presence.process.pid, number)


def _stacks(presence: ProcessInfo, state: str) -> str:
    """Return the stacks of threads running a worker's method, from the current line up to the method."""
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
