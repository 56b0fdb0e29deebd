"""Who a process is, in words that outlast it: a pid alone is soon somebody else's."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from rlflow.watchdog import kin


@dataclass(frozen=True)
class Process:
    """A process in terms that no later process shares."""

    pid: int  # its number, which another process gets later
    started: str  # clock ticks since boot
    boot: str  # id of the kernel's start
    space: str  # the pid namespace, since one pid means another process in each
    host: str  # name of the machine

    @classmethod
    def this(cls) -> Process:
        return cls(os.getpid(), _started(os.getpid()) or "", boot(), _space(), socket.gethostname())

    def alive(self) -> bool | None:
        """None where it cannot be told from here: another machine or another container."""
        elsewhere = self.host != socket.gethostname()
        if self.boot != boot() or (elsewhere and not self.boot):
            return None if elsewhere else False  # False: this machine has been started anew since
        if self.space != _space():
            return None
        return _alive(self.pid) if not self.started else _started(self.pid) == self.started

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def parsed(values: object) -> Process | None:
    """The process that a mapping tells of; None where it tells of none."""
    if not isinstance(values, dict) or not isinstance(values.get("pid"), int):
        return None
    words = [values.get(name) for name in ("started", "boot", "space", "host")]
    if not all(isinstance(word, str) for word in words):
        return None
    return Process(values["pid"], *map(str, words))


def _started(pid: int) -> str | None:
    """None for a process that is gone or waits only to be collected."""
    found = kin.stat(pid)
    return found.started if found is not None and found.state not in "ZX" else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def boot() -> str:
    """Which start of this machine it is; empty where no kernel tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
