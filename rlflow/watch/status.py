"""A run's state as a file, status.json: written whole or not at all, and read so that a killed process counts as died."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflow import durable
from rlflow.process import Process, parsed

FILE = "status.json"
STATES = ("running", "done", "failed", "interrupted")


@dataclass(frozen=True)
class Status:
    """What a run is doing, and the process that does it."""

    state: str  # running, done, failed, interrupted; read also as died
    flow: str = ""
    iteration: int = 0  # finished iterations
    iterations: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)  # the last one, under rlflow's names
    error: str = ""
    started: float = 0.0  # seconds since the epoch
    updated: float = 0.0
    process: Process | None = None


def begun(flow: str, iterations: int) -> Status:
    """The status of this process as it starts a run."""
    now = time.time()
    return Status("running", flow, 0, iterations, started=now, updated=now, process=Process.this())


def write(folder: Path, status: Status, flush: bool = True) -> None:
    """Put the status in place by a rename, so that no reader sees half of it; on the disk unless that is not worth waiting for. Raises
    OSError."""
    durable.replace(folder / FILE, f"{json.dumps(asdict(replace(status, updated=time.time())))}\n".encode(), flush=flush)


def read(folder: Path) -> Status | None:
    """The status; ``died`` where it says running and its process is gone; None where there is none. Raises ValueError for a file
    that is damaged or another's."""
    try:
        found = json.loads(durable.read(folder / FILE))
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
             "started": (int, float), "updated": (int, float)}
    values = {name: found[name] for name in kinds if name in found}
    wrong = [name for name, value in values.items() if not isinstance(value, kinds[name])]  # type: ignore[arg-type]
    if wrong:
        raise ValueError(f"found {wrong[0]} = {values[wrong[0]]!r}")
    values["evaluation"] = {name: value for name, value in values.get("evaluation", {}).items() if isinstance(value, int | float)}
    return Status(**values, process=parsed(found.get("process")))


def gone(status: Status) -> bool:
    """Whether the process that wrote the status has ended. Where that cannot be told, on another machine, it counts as running."""
    return status.process is not None and status.process.alive() is False
