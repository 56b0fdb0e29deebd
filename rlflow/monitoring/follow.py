"""Follow a run from another process: read its files while they grow, and report their content."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rlflow.author.figures import HELD_OUT
from rlflow.checkpoints.logs import Growing
from rlflow.monitoring import keys, status
from rlflow.monitoring.frame import RECENT, Frame
from rlflow.monitoring.history import History, RunSummary, stage_seconds, summarised
from rlflow.monitoring.recorded import recorded
from rlflow.monitoring.reporter import Reporter, RunInfo

EVERY_SECONDS = 0.5


def follow(folder: Path, reporter: Reporter, wait: Callable[[float], None] = time.sleep) -> RunSummary:
    """Pass the events of a run to a reporter until the run ends, and return the run's summary.

    ``wait``: called with the seconds to wait before each new read.
    """
    metrics = Growing(folder / "metrics.jsonl")
    reporter.start(info(summarised(folder)))
    while True:
        summary = summarised(folder)  # read the state before the lines, so that the last lines are not missed
        pass_lines(metrics.lines(), folder, reporter)
        if summary.state != "running":
            return summary
        wait(EVERY_SECONDS)


def pass_lines(lines: list[bytes], folder: Path, reporter: Reporter) -> None:
    """Pass lines of metrics.jsonl to the reporter, with the seconds of nodes from timeline.json.

    These seconds are those of the last iteration.
    """
    stages, table = (stage_seconds(folder), keys.read(folder)) if lines else ({}, {})
    for line in lines:
        history = History(table)
        history.add(line)
        known = keys.completed(table, history.names)
        for number, values in history.iterations:
            reporter.iteration(number, keys.by_figure(values, known), [], stages)
        for number, values in history.evaluations:
            reporter.evaluation(number, keys.by_figure(values, known))


def info(summary: RunSummary) -> RunInfo:
    """Return a run's summary as the ``RunInfo`` that reporters take."""
    return RunInfo(summary.folder, summary.flow, summary.iterations)


def frame(folder: Path) -> Frame:
    """Return the state of a run as a frame, from the current content of its files."""
    run = recorded(folder)
    history, summary = run.history, run.summary
    recent = tuple(values["seconds"] for _, values in history.iterations[-RECENT:] if "seconds" in values)
    evaluated = history.evaluations[-1][0] if history.evaluations else 0
    curve = next((run.curve(name) for name in run.keys(lambda figure: figure == HELD_OUT)), ())
    return Frame(
        flow=summary.flow,
        place=str(folder),
        state=summary.state,
        done=summary.iteration,
        iterations=summary.iterations,
        metrics=summary.figures,
        evaluation=summary.evaluated,
        evaluated=evaluated,
        stages=stage_seconds(folder),
        recent=recent,
        curve=curve,
        trained=run.costs.trained or 0,
        running=max(time.time() - summary.updated, 0.0),
    )


def ending(summary: RunSummary) -> str:
    """Return a line that says how a run has ended."""
    endings = {
        "unknown": f"has no {status.FILE}, so its state is unknown",
        "died": "died: its process ended without writing a last status",
    }
    state = endings.get(summary.state, summary.state)
    text = f"{summary.folder.name}: {state} after {summary.iteration} of {summary.iterations} iterations"
    return text + (f": {summary.error}" if summary.error else "")
