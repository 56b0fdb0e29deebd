"""Following a run from outside: its files are read as they grow and told to a reporter, as the run itself would tell them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rlflow.watch import status
from rlflow.watch.frame import RECENT, Frame
from rlflow.watch.history import Growing, History, RunSummary, stage_seconds, summarised
from rlflow.watch.reporter import Reporter, RunInfo

EVERY_SECONDS = 0.5


def follow(folder: Path, reporter: Reporter, wait: Callable[[float], None] = time.sleep) -> RunSummary:
    """Tell a run from its first line to its end; return what it came to. ``wait`` is called between looks."""
    metrics = Growing(folder / "metrics.jsonl")
    reporter.start(info(summarised(folder)))
    while True:
        found = summarised(folder)  # before the lines: whatever it wrote before it ended is told
        tell(metrics.lines(), folder, reporter)
        if found.state != "running":
            return found
        wait(EVERY_SECONDS)


def tell(lines: list[bytes], folder: Path, reporter: Reporter) -> None:
    """Each line to the reporter. Only the last iteration's times are known."""
    stages = stage_seconds(folder) if lines else {}
    for line in lines:
        one = History()
        one.add(line)
        for number, values in one.iterations:
            reporter.iteration(number, values, [], stages)
        for number, values in one.evaluations:
            reporter.evaluation(number, values)


def info(found: RunSummary) -> RunInfo:
    return RunInfo(found.folder, found.flow, found.iterations)


def frame(folder: Path) -> Frame:
    """The run as its files show it now."""
    history, found = History(), summarised(folder)
    for line in Growing(folder / "metrics.jsonl").lines():
        history.add(line)
    recent = tuple(values["seconds"] for _, values in history.iterations[-RECENT:] if "seconds" in values)
    evaluated, evaluation = history.evaluations[-1] if history.evaluations else (0, dict(found.evaluation))
    return Frame(found.flow, str(folder), found.state, found.iteration, found.iterations, found.metrics, evaluation, evaluated,
                 stage_seconds(folder), recent, max(time.time() - found.updated, 0.0))


def ending(found: RunSummary) -> str:
    """What a run came to, in a line."""
    said = {
        "unknown": f"left no {status.FILE} that says whether it still goes", "died": "died: its process is gone and left no last word",
    }
    text = f"{found.folder.name}: {said.get(found.state, found.state)} after {found.iteration} of {found.iterations} iterations"
    return text + (f": {found.error}" if found.error else "")
