"""The identity of a process, to be written down: a pid alone soon belongs to another process, so the start
time and the machine go with it.

`Process.alive` is the one check of whether a process still runs: locks, status files, leftovers and shared
memory all use it. Beneath it is `rlflow.processes.watchdog.kin.lives`, which the watchdog and rewards use
directly for processes of their own machine.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from rlflow.processes.watchdog import kin


@dataclass(frozen=True)
class Process:
    """One process of one start of one machine."""

    pid: int
    started: str  # clock ticks from the machine's start to the process's; empty where the system does not say
    boot: str  # id of this start of the machine's kernel; empty where the system does not say
    space: str  # id of the pid namespace: one pid means different processes in different containers
    host: str  # name of the machine

    @classmethod
    def this(cls) -> Process:
        """The process that calls this."""
        return cls(os.getpid(), kin.started(os.getpid()), boot(), _space(), socket.gethostname())

    @classmethod
    def of_tag(cls, tag: str) -> Process | None:
        """The process of a ``tag`` that was written on this machine; None for text that is no tag."""
        pid, _, rest = tag.partition(".")
        started, dot, space = rest.partition(".")
        return cls(int(pid), started, boot(), space, socket.gethostname()) if pid.isdigit() and dot else None

    def alive(self) -> bool | None:
        """Whether the process runs or is stopped; None where this cannot be known from here: another machine
        or another container."""
        elsewhere = self.host != socket.gethostname()
        if self.boot != boot() or (elsewhere and not self.boot):
            return None if elsewhere else False  # False: this machine has been started anew since
        if self.space != _space():
            return None
        if self.started:
            return kin.lives(self.pid, self.started)
        # takes longer than all else here, and is needed where the system does not say when a process was
        # started
        import psutil

        return bool(psutil.pid_exists(self.pid))

    def tag(self) -> str:
        """The process as part of a file's name, unique on this machine until it is started anew:
        ``PID.STARTED.SPACE``."""
        return f"{self.pid}.{self.started}.{self.space}"

    def as_json(self) -> str:
        """The fields as a JSON object, which ``parsed`` reads."""
        return json.dumps(asdict(self))


def parsed(values: object) -> Process | None:
    """The process that a decoded JSON object describes; None for a value that describes none."""
    if not isinstance(values, dict) or not isinstance(values.get("pid"), int):
        return None
    words = [values.get(name) for name in ("started", "boot", "space", "host")]
    if not all(isinstance(word, str) for word in words):
        return None
    return Process(values["pid"], *map(str, words))


def boot() -> str:
    """The id of this start of the machine's kernel; empty on a system that has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    """The id of this process's pid namespace; empty on a system that has none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
