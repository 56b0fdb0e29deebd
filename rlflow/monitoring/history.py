"""Reads the folder of a run in any state: half written, damaged, still growing, or another program's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.author.figures import Figure
from rlflow.checkpoints.logs import as_object, objects, read_object, tail
from rlflow.errors import PlanError, nearest
from rlflow.monitoring import keys, status

SIGNS = ("settings.json", "metrics.jsonl", status.FILE)  # a folder with one of these files is a run


@dataclass(frozen=True)
class RunSummary:
    """A summary of a run, from the last lines of its files."""

    folder: Path
    state: str  # running, done, failed, interrupted, died or unknown
    flow: str = "?"
    iteration: int = 0  # finished iterations
    iterations: int = 0  # iterations in all
    evaluation: Mapping[str, float] = field(default_factory=dict)  # the last evaluation
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last iteration
    table: Mapping[str, Figure] = field(default_factory=dict)  # name in both → its figure
    updated: float = 0.0  # time of the last write to a file, seconds since the epoch
    error: str = ""  # why the run failed
    problem: str = ""  # what could not be read

    @property
    def figures(self) -> dict[Figure, float]:
        """The metrics of the last iteration by figure."""
        return keys.by_figure(self.metrics, self.table)

    @property
    def evaluated(self) -> dict[Figure, float]:
        """The metrics of the last evaluation by figure."""
        return keys.by_figure(self.evaluation, self.table)


@dataclass
class History:
    """The lines of metrics.jsonl. A resumed run may have written an iteration twice."""

    # name → figure, for the names in the run's figures.json
    table: Mapping[str, Figure] = field(default_factory=dict)
    iterations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (iteration, its numbers)
    # (iterations before it, its numbers)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    damaged: int = 0  # lines that cannot be read

    @property
    def names(self) -> set[str]:
        """The names of all metrics."""
        return {name for _, values in (*self.iterations, *self.evaluations) for name in values}

    def add(self, line: bytes) -> None:
        """Read one line; a damaged line is only counted."""
        row = as_object(line)
        number = row.get("iteration") if row else None
        if row is None or not isinstance(number, int):
            self.damaged += 1
            return
        values = {
            name: float(value) for name, value in row.items() if name != "iteration" and is_number(value)
        }
        is_evaluation = keys.is_evaluation(self.table, row)
        (self.evaluations if is_evaluation else self.iterations).append((number, values))


def is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run, by the files in it."""
    return any((folder / name).is_file() for name in SIGNS)


def find_run(text: str, base: Path = Path("runs")) -> Path:
    """Find the folder of a run by its path, or by its name in ``base``. Raises PlanError with the nearest
    name."""
    path = Path(text)
    for folder in (path, base / text):
        if is_run(folder):
            return folder
    if path.exists() or (base / text).exists():
        raise PlanError.of(
            "not-a-run",
            f"'{text}' is not the folder of a run",
            found=f"a folder without {', '.join(SIGNS)}",
            expected="the folder of a run",
            remedy="rlflow runs lists the runs of a folder",
        )
    names = [str(path) for path in run_folders(path.parent)] + [path.name for path in run_folders(base)]
    raise PlanError.of(
        "no-run",
        f"there is no run '{text}'",
        found="no such folder",
        expected="the folder of a run, or its name in runs/",
        nearest=nearest(text, names),
        remedy="rlflow runs lists the runs of a folder",
    )


def run_folders(base: Path) -> list[Path]:
    """The folders of runs in a folder, sorted by name; empty if the folder cannot be read."""
    try:
        return sorted(
            path
            for path in base.iterdir()
            if not path.name.startswith(".") and path.is_dir() and is_run(path)
        )
    except OSError:
        return []


def summarised(folder: Path) -> RunSummary:
    """The summary of a run's folder. Never raises: unreadable files give default values."""
    settings, recorded, problem = read_object(folder / "settings.json"), None, ""
    try:
        recorded = status.read(folder)
    except ValueError as error:
        problem = f"{status.FILE} is damaged: {error}"
    table = keys.read(folder)
    last = History(table)
    for line in tail(folder / "metrics.jsonl"):
        last.add(line)
    finished = last.iterations[-1][0] + 1 if last.iterations else 0
    options = settings.get("options")
    planned = options.get("iterations", 0) if isinstance(options, dict) else 0
    total = recorded.iterations if recorded else planned if isinstance(planned, int) else 0
    evaluation = (
        last.evaluations[-1][1] if last.evaluations else dict(recorded.evaluation) if recorded else {}
    )
    metrics = last.iterations[-1][1] if last.iterations else {}
    return RunSummary(
        folder,
        recorded.state if recorded else _guessed(folder),
        str((recorded and recorded.flow) or settings.get("flow", "?")),
        max(finished, recorded.iteration if recorded else 0),
        total,
        evaluation,
        metrics,
        keys.completed(table, (*metrics, *evaluation)),
        _touched(folder),
        recorded.error if recorded else "",
        problem,
    )


def _guessed(folder: Path) -> str:
    """The state of a run without a status file: done if its models were saved, which happens last."""
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
    """Node → seconds in the last iteration of timeline.json. The file is read line by line, because an active
    run has not closed its JSON."""
    lines = (line.strip(b"[,\r") for line in tail(folder / "timeline.json"))
    events = [event for event in objects(lines) if event.get("ph") == "X"]
    # without the events of single ranks
    nodes = (event for event in events if event.get("cat") != "rank")
    numbered = [
        (event["args"].get("iteration"), event) for event in nodes if isinstance(event.get("args"), dict)
    ]
    last = max((number for number, _ in numbered if isinstance(number, int)), default=None)
    seconds: dict[str, float] = {}
    for number, event in numbered:
        if number == last and isinstance(event.get("name"), str) and is_number(event.get("dur")):
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"] / 1e6
    return seconds


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that fits into a float; JSON integers may have any length."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023
    )
