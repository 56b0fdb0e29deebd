"""A run's state as a file, status.json: written whole or not at all, and read so that a killed process counts as died."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

FILE = "status.json"
STATES = ("running", "done", "failed", "interrupted")


@dataclass(frozen=True)
class Status:
    """What a run is doing. ``pid``, ``born`` and ``boot`` name one process of one boot of one host: a pid alone is given again."""

    state: str  # running, done, failed, interrupted; read also as died
    flow: str = ""
    iteration: int = 0  # finished iterations
    iterations: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)  # the last one, under rlflow's names
    error: str = ""
    started: float = 0.0  # seconds since the epoch
    updated: float = 0.0
    pid: int = 0
    born: str = ""  # the process's start, in ticks since boot
    boot: str = ""
    host: str = ""


def begun(flow: str, iterations: int) -> Status:
    """The status of this process as it starts a run."""
    now, pid = time.time(), os.getpid()
    return Status("running", flow, 0, iterations, started=now, updated=now, pid=pid, born=born(pid) or "", boot=_boot(),
                  host=socket.gethostname())


def write(folder: Path, status: Status) -> None:
    """Put the status in place by a rename, so that no reader sees half of it. Raises OSError."""
    aside = folder / f".{FILE}.{os.getpid()}"
    try:
        aside.write_text(json.dumps(asdict(replace(status, updated=time.time()))) + "\n")
        aside.replace(folder / FILE)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read(folder: Path) -> Status | None:
    """The status; ``died`` where it says running and its process is gone; None where there is none. Raises ValueError for a file
    that is damaged or another's."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    status = _checked(found)
    return replace(status, state="died") if status.state == "running" and gone(status) else status


def _checked(found: Any) -> Status:
    if not isinstance(found, dict) or found.get("state") not in STATES:
        raise ValueError(f"found no known state, expected one of {', '.join(STATES)}")
    kinds = {"state": str, "flow": str, "iteration": int, "iterations": int, "evaluation": dict, "error": str,
             "started": (int, float), "updated": (int, float), "pid": int, "born": str, "boot": str, "host": str}
    values = {f.name: found[f.name] for f in fields(Status) if f.name in found}
    wrong = [name for name, value in values.items() if not isinstance(value, kinds[name])]  # type: ignore[arg-type]
    if wrong:
        raise ValueError(f"found {wrong[0]} = {values[wrong[0]]!r}")
    values["evaluation"] = {name: value for name, value in values.get("evaluation", {}).items() if isinstance(value, int | float)}
    return Status(**values)


def gone(status: Status) -> bool:
    """Whether the process that wrote the status has ended. Of another host nothing is known, and it counts as running."""
    if status.host != socket.gethostname():
        return False
    return status.boot != _boot() or born(status.pid) != (status.born or None)


def born(pid: int) -> str | None:
    """When a process started, in ticks since boot; None where it is gone or only waits to be reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
