"""`rlflow compare`: compare recorded runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from rlflow.checkpoints import durable
from rlflow.compiler.graph import wire
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.graph.model import Graph
from rlflow.errors import PlanError
from rlflow.monitoring.comparison import compared, drawn
from rlflow.monitoring.history import find_run
from rlflow.monitoring.recorded import Recorded, recorded
from rlflow.monitoring.tables import output

GRAPH = "graph.msgpack"
LINES = 12  # how many lines of the difference between two graphs are printed
WIDTH = 100  # columns of charts if the width of the terminal is unknown


def compare_runs(names: Sequence[str], metrics: Sequence[str], as_json: bool) -> int:
    """Print how runs differ in settings and results, and return 0.

    Raises PlanError if a folder isn't a run's, if there are fewer than two runs, or if no run has one of the
    metrics.
    """
    folders = list(dict.fromkeys(find_run(name).resolve() for name in names))
    if len(folders) < 2:
        raise PlanError.of(
            "one-run",
            "a comparison needs at least two runs",
            found=", ".join(names) or "none",
            expected="two runs",
            remedy="rlflow compare RUN RUN; rlflow show RUN prints a single run",
        )
    runs = [recorded(folder) for folder in folders]
    comparison = compared(runs, metrics, graph_differences(runs))
    if as_json:
        print(json.dumps(comparison.as_json()))
    else:
        output(drawn(comparison, columns()))
    return 0


def columns() -> int:
    """Return the width for charts: the terminal's, or WIDTH if there is no terminal."""
    return Console().width if sys.stdout.isatty() else shutil.get_terminal_size((WIDTH, 0)).columns


def graph_differences(runs: Sequence[Recorded]) -> Mapping[str, list[str]]:
    """Return how each run's graph differs from that of the first run, as lines by run name.

    Differences in settings are left out, and so are runs whose graph is the same.
    """
    first, *others = runs
    differences = {}
    for run in others:
        if run.settings.get("graph") != first.settings.get("graph") and (
            lines := _lines(first.folder, run.folder)
        ):
            more = [f"… {len(lines) - LINES} more"] if len(lines) > LINES else []
            differences[run.name] = [*lines[:LINES], *more]
    return differences


def _lines(first: Path, other: Path) -> list[str]:
    """Return the differences between two runs' graphs as lines, leaving out settings."""
    try:
        return list(map(str, diff(_graph(first), _graph(other), settings=False)))
    except (OSError, PlanError) as error:
        return [f"unknown: {str(error).splitlines()[0]}"]


def _graph(folder: Path) -> Graph:
    return wire.unpack(durable.read(folder / GRAPH))
