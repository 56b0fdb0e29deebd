"""A run's state in status.json, which is written atomically.

It also lets readers find out that the run's process was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflow.checkpoints import durable
from rlflow.processes.process import Process, parsed

FILE = "status.json"
STATES = ("running", "done", "failed", "interrupted")


@dataclass(frozen=True)
class Status:
    """A run's state, and its process."""

    state: str  # running, done, failed or interrupted; `read` may also give died
    flow: str = ""
    iteration: int = 0  # number of finished iterations
    iterations: int = 0  # number of planned iterations
    # metrics of the last evaluation, under rlflow's names
    evaluation: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # why the run failed
    started: float = 0.0  # time at which the run started, seconds since the epoch
    updated: float = 0.0  # time of this write, seconds since the epoch
    process: Process | None = None  # the process of the run


def begun(flow: str, iterations: int) -> Status:
    """Return the status of a run that this process has just started."""
    now = time.time()
    return Status("running", flow, 0, iterations, started=now, updated=now, process=Process.this())


def write(folder: Path, status: Status, flush: bool = True) -> None:
    """Write status.json by renaming, so that nobody reads a partial file. Raises OSError.

    ``flush``: whether to wait until the file is on disk.
    """
    durable.replace(
        folder / FILE, f"{json.dumps(asdict(replace(status, updated=time.time())))}\n".encode(), flush=flush
    )


def read(folder: Path) -> Status | None:
    """Return the status in a run's folder, or None if there is no file.

    If the file says "running" but the process is gone, the state is "died". Raises ValueError if the file is
    damaged or isn't rlflow's.
    """
    try:
        values = json.loads(durable.read(folder / FILE))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    status = _checked(values)
    return replace(status, state="died") if status.state == "running" and gone(status) else status


def _checked(record: Any) -> Status:
    if not isinstance(record, dict) or record.get("state") not in STATES:
        raise ValueError(f"it has no known state, expected one of {', '.join(STATES)}")
    kinds = {
        "state": str,
        "flow": str,
        "iteration": int,
        "iterations": int,
        "evaluation": dict,
        "error": str,
        "started": (int, float),
        "updated": (int, float),
    }
    values = {name: record[name] for name in kinds if name in record}
    mistyped = [name for name, value in values.items() if not isinstance(value, kinds[name])]  # type: ignore[arg-type]
    if mistyped:
        raise ValueError(f"found {mistyped[0]} = {values[mistyped[0]]!r}")
    values["evaluation"] = {
        name: value for name, value in values.get("evaluation", {}).items() if isinstance(value, int | float)
    }
    return Status(**values, process=parsed(record.get("process")))


def gone(status: Status) -> bool:
    """Whether the run's process has ended.

    A process on another machine can't be checked, so it counts as running.
    """
    return status.process is not None and status.process.alive() is False
