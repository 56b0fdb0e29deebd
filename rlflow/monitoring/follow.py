"""Follow a run from another process by reading its files as they grow."""

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
    """Report a run's events to a reporter until the run ends, then return the run's summary.

    ``wait`` is called with the seconds to wait before the files are read again.
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
    """Report lines of metrics.jsonl, together with the seconds of each node from timeline.json.

    The seconds are always those of the last iteration.
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
    """Turn a run's summary into the ``RunInfo`` that reporters take."""
    return RunInfo(summary.folder, summary.flow, summary.iterations)


def frame(folder: Path) -> Frame:
    """Return a frame with the current state of a run, read from its files."""
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
    """Return a line that says how a run ended."""
    endings = {
        "unknown": f"has no {status.FILE}, so its state is unknown",
        "died": "died: its process ended without writing a last status",
    }
    state = endings.get(summary.state, summary.state)
    text = f"{summary.folder.name}: {state} after {summary.iteration} of {summary.iterations} iterations"
    return text + (f": {summary.error}" if summary.error else "")
