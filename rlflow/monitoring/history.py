"""Read a run's folder in any state: incomplete, damaged, still growing, or from another program."""

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
    """A summary of a run, from the ends of its files."""

    folder: Path
    state: str  # running, done, failed, interrupted, died or unknown
    flow: str = "?"
    iteration: int = 0  # number of finished iterations
    iterations: int = 0  # number of planned iterations
    evaluation: Mapping[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the last iteration
    table: Mapping[str, Figure] = field(default_factory=dict)  # name of a metric → its figure
    updated: float = 0.0  # time of the last write to a file of the run, seconds since the epoch
    error: str = ""  # why the run failed
    problem: str = ""  # which file could not be read, and why

    @property
    def figures(self) -> dict[Figure, float]:
        """The last iteration's metrics, by figure."""
        return keys.by_figure(self.metrics, self.table)

    @property
    def evaluated(self) -> dict[Figure, float]:
        """The last evaluation's metrics, by figure."""
        return keys.by_figure(self.evaluation, self.table)


@dataclass
class History:
    """The metrics in metrics.jsonl. An iteration can appear twice if the run was resumed."""

    # name of a metric → its figure, from the run's figures.json
    table: Mapping[str, Figure] = field(default_factory=dict)
    # (iteration, metrics of the iteration)
    iterations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    # (number of iterations before the evaluation, metrics of the evaluation)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    damaged: int = 0  # number of lines that cannot be read

    @property
    def names(self) -> set[str]:
        """The names of all metrics."""
        return {name for _, values in (*self.iterations, *self.evaluations) for name in values}

    def add(self, line: bytes) -> None:
        """Add a line of metrics.jsonl. Damaged lines are only counted."""
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
    """Whether a folder looks like a run's, judging by its files."""
    return any((folder / name).is_file() for name in SIGNS)


def find_run(text: str, base: Path = Path("runs")) -> Path:
    """Return the folder of a run, given its path or its name in ``base``.

    Raises PlanError with the nearest name if there is no such run.
    """
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
    """Return the runs' folders in ``base``, sorted by name. Empty if ``base`` can't be read."""
    try:
        return sorted(
            path
            for path in base.iterdir()
            if not path.name.startswith(".") and path.is_dir() and is_run(path)
        )
    except OSError:
        return []


def summarised(folder: Path) -> RunSummary:
    """Return a summary of the run in a folder.

    Never raises: if a file can't be read, its values keep their defaults.
    """
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
    """Guess the state of a run without a status file.

    It is "done" if there are final models, because saving them is a run's last step, else "unknown".
    """
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
    """Return how many seconds each node took in the last iteration, from timeline.json.

    The file is read line by line, because it isn't complete JSON while the run is going.
    """
    lines = (line.strip(b"[,\r") for line in tail(folder / "timeline.json"))
    events = [event for event in objects(lines) if event.get("ph") == "X"]
    # skip events of single ranks
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
    """Whether a JSON value is a number that fits into a float. JSON integers can be of any length."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023
    )
