"""Reading a run's folder, whatever state it is in: half-written, damaged, another program's, or still growing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow import durable
from rlflow.errors import PlanError, nearest
from rlflow.watch import status
from rlflow.watch.names import reward_roles

SIGNS = ("settings.json", "metrics.jsonl", status.FILE)  # any of them makes a folder a run's
TAIL = 256 * 1024  # bytes from the end of a file that hold its last lines


@dataclass(frozen=True)
class RunSummary:
    """What a folder says of its run, cheaply: the ends of its files. ``problem`` says what could not be read."""

    folder: Path
    state: str
    flow: str = "?"
    iteration: int = 0
    iterations: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    updated: float = 0.0
    error: str = ""
    problem: str = ""


@dataclass
class History:
    """All lines of metrics.jsonl: (iteration, metrics) with the numbers that are there, evaluations apart. A resumed run may have told
    an iteration twice."""

    iterations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    damaged: int = 0

    def add(self, line: bytes) -> None:
        row = as_object(line)
        number = row.get("iteration") if row else None
        if row is None or not isinstance(number, int):
            self.damaged += 1
            return
        values = {name: float(value) for name, value in row.items() if name != "iteration" and is_number(value)}
        judged = any(name.startswith("evaluation/") for name in row)
        (self.evaluations if judged else self.iterations).append((number, values))


class Growing:
    """The lines of a file that may still grow: each once, and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> list[bytes]:
        """What has come since the last call. A file that is not there has no lines; one that shrank is read anew."""
        try:
            with open(durable.open_plain(self._path), "rb") as file:
                self._offset = 0 if os.fstat(file.fileno()).st_size < self._offset else self._offset
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not whole:
            return []
        self._offset += len(whole) + 1
        return whole.split(b"\n")


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SIGNS)


def find_run(text: str, base: Path = Path("runs")) -> Path:
    """A run by its folder, or by its name in ``runs``. Raises PlanError with the nearest name."""
    given = Path(text)
    for folder in (given, base / text):
        if is_run(folder):
            return folder
    if given.exists() or (base / text).exists():
        raise PlanError.of("not-a-run", f"'{text}' is no run's folder", found=f"none of {', '.join(SIGNS)} there",
                           expected="the folder of a run", remedy="rlflow runs lists the runs of a folder")
    known = [str(path) for path in run_folders(given.parent)] + [path.name for path in run_folders(base)]
    raise PlanError.of("no-run", f"there is no run '{text}'", found="no such folder", expected="the folder of a run, or its name in runs/",
                       nearest=nearest(text, known), remedy="rlflow runs lists the runs of a folder")


def run_folders(base: Path) -> list[Path]:
    """The runs in a folder, by name. A folder that cannot be read holds none."""
    try:
        return sorted(path for path in base.iterdir() if not path.name.startswith(".") and path.is_dir() and is_run(path))
    except OSError:
        return []


def summarised(folder: Path) -> RunSummary:
    """Never raises for what the folder holds."""
    settings, known, problem = read_object(folder / "settings.json"), None, ""
    try:
        known = status.read(folder)
    except ValueError as error:
        problem = f"{status.FILE} is damaged: {error}"
    last = History()
    for line in tail(folder / "metrics.jsonl"):
        last.add(line)
    done = last.iterations[-1][0] + 1 if last.iterations else 0
    options = settings.get("options")
    planned = options.get("iterations", 0) if isinstance(options, dict) else 0
    total = known.iterations if known else planned if isinstance(planned, int) else 0
    judged = last.evaluations[-1][1] if last.evaluations else {}
    return RunSummary(
        folder, known.state if known else _guessed(folder), str((known and known.flow) or settings.get("flow", "?")),
        max(done, known.iteration if known else 0), total, judged or (known.evaluation if known else {}),
        last.iterations[-1][1] if last.iterations else {}, _touched(folder), known.error if known else "", problem,
    )


def _guessed(folder: Path) -> str:
    """The state of a run that left none: its models are saved last."""
    return "done" if (folder / "final").is_dir() else "unknown"


def _touched(folder: Path) -> float:
    times = []
    for name in SIGNS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def stage_seconds(folder: Path) -> dict[str, float]:
    """Seconds by node of the last iteration in timeline.json, which is read line by line: a run under way has not closed it."""
    events = [event for line in tail(folder / "timeline.json") if (event := as_object(line.strip(b"[,\r"))) and event.get("ph") == "X"]
    nodes = (event for event in events if event.get("cat") != "rank")  # their parts on ranks are told besides
    numbered = [(event["args"].get("iteration"), event) for event in nodes if isinstance(event.get("args"), dict)]
    last = max((number for number, _ in numbered if isinstance(number, int)), default=None)
    seconds: dict[str, float] = {}
    for number, event in numbered:
        if number == last and isinstance(event.get("name"), str) and is_number(event.get("dur")):
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"] / 1e6
    return seconds


def reward(metrics: Mapping[str, float]) -> float | None:
    """The mean reward, of several roles the first's."""
    role = next(iter(reward_roles(metrics)), None)
    return metrics.get(f"{role}/mean", metrics.get("reward/mean"))


def tail(path: Path) -> list[bytes]:
    """The last whole lines of a file; none where it cannot be read."""
    try:
        with open(durable.open_plain(path), "rb") as file:
            start = max(os.fstat(file.fileno()).st_size - TAIL, 0)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [line for line in (lines[1:] if start else lines)[:-1] if line]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file; an empty one where there is none."""
    try:
        return as_object(durable.read(path)) or {}
    except OSError:
        return {}


def as_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number, and one that a float can be: a file may hold integers of any length."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023)
