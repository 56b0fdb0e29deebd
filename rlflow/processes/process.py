"""Identify a process in files, by its pid, start time and machine.

A pid isn't enough, because the system reuses pids. Locks, status files, leftovers and shared memory ask
`Process.alive` whether a process still exists. The watchdog and rewards only deal with processes on their own
machine, and use `rlflow.processes.watchdog.process_tag.lives` instead.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from rlflow.processes.watchdog import process_tag


@dataclass(frozen=True)
class Process:
    """A process, identified uniquely across machines and reboots."""

    pid: int
    started: (
        # clock ticks from the machine's start to the process's start; empty if the system does not report it
        str
    )
    boot: str  # id of the machine's current boot; empty if the system doesn't report it
    space: str  # id of the pid namespace: the same pid means different processes in different containers
    host: str  # name of the machine

    @classmethod
    def this(cls) -> Process:
        """Return the current process."""
        return cls(os.getpid(), process_tag.started(os.getpid()), boot(), _space(), socket.gethostname())

    @classmethod
    def of_tag(cls, tag: str) -> Process | None:
        """Return the process that ``tag`` identifies, or None if the tag is invalid.

        The tag must have been written on this machine.
        """
        pid, _, rest = tag.partition(".")
        started, dot, space = rest.partition(".")
        return cls(int(pid), started, boot(), space, socket.gethostname()) if pid.isdigit() and dot else None

    def alive(self) -> bool | None:
        """Whether the process still exists, running or stopped.

        None if there is no way to tell, because the process is on another machine or in another container.
        """
        elsewhere = self.host != socket.gethostname()
        if self.boot != boot() or (elsewhere and not self.boot):
            # False: this machine has been restarted since the process was recorded
            return None if elsewhere else False
        if self.space != _space():
            return None
        if self.started:
            return process_tag.lives(self.pid, self.started)
        # This check is slow. It's only needed if the system doesn't report start times.
        import psutil

        return bool(psutil.pid_exists(self.pid))

    def tag(self) -> str:
        """Return the process as part of a file name: ``PID.STARTED.SPACE``.

        It is unique on this machine until the next boot.
        """
        return f"{self.pid}.{self.started}.{self.space}"

    def as_json(self) -> str:
        """Return the fields as a JSON object. Decode it and call ``parsed`` to get the process back."""
        return json.dumps(asdict(self))


def parsed(values: object) -> Process | None:
    """Return the process described by a decoded JSON object, or None if it doesn't describe one."""
    if not isinstance(values, dict) or not isinstance(values.get("pid"), int):
        return None
    words = [values.get(name) for name in ("started", "boot", "space", "host")]
    if not all(isinstance(word, str) for word in words):
        return None
    return Process(values["pid"], *map(str, words))


def boot() -> str:
    """Return the id of this machine's current boot, or "" if the system doesn't report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    """Return the id of this process's pid namespace, or "" if the system doesn't report it."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
