"""The commands that display runs (`rlflow runs`, `show`, `explain` and `watch`), and `rlflow doctor`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rlflow.errors import PlanError, nearest
from rlflow.monitoring import tables
from rlflow.monitoring.choosing import chosen, condition, full_name, listed_run
from rlflow.monitoring.doctor import sections
from rlflow.monitoring.explained import as_json, explanation
from rlflow.monitoring.follow import ending, follow, frame
from rlflow.monitoring.frame import draw
from rlflow.monitoring.history import find_run, is_run, run_folders, summarised
from rlflow.monitoring.live import Live, lively
from rlflow.monitoring.plain_display import Plain
from rlflow.monitoring.tables import output, plain, story


def list_runs(text: str, sort: str = "updated", where: Sequence[str] = (), as_json: bool = False) -> int:
    """Print a table of the runs in the folder ``text``, and return 0.

    ``sort``: the setting or metric to sort by. ``where``: conditions that a run must meet to be listed.
    Raises PlanError if the folder is missing, a name is unknown or a condition is invalid.
    """
    conditions = [condition(each) for each in where]
    base = Path(text)
    if not base.is_dir():
        siblings = (
            [str(path) for path in base.parent.iterdir() if path.is_dir()] if base.parent.is_dir() else []
        )
        raise PlanError.of(
            "no-runs",
            f"the folder '{base}' does not exist",
            found="no such folder",
            expected="a folder that holds runs",
            nearest=nearest(str(base), siblings),
            remedy="rlflow runs FOLDER: the folder given as --out, or runs",
        )
    summaries = [summarised(folder) for folder in ([base] if is_run(base) else run_folders(base))]
    shown = chosen([listed_run(summary) for summary in summaries], conditions, sort)
    if as_json:
        print(tables.as_json(shown))
    elif not shown:
        output(
            [
                plain(
                    f"none of the {len(summaries)} runs in {base} meets the conditions"
                    if summaries
                    else f"no runs in {base}"
                )
            ]
        )
    else:
        width = Console().width if sys.stdout.isatty() else tables.WIDE
        output(tables.runs(shown, time.time(), [full_name(sort), *(each.name for each in conditions)], width))
    return 0


def show_run(text: str) -> int:
    """Print the summary of a run, given its folder or name, and return 0.

    Raises PlanError if there is no such run.
    """
    output(story(find_run(text)))
    return 0


def watch_run(text: str, once: bool) -> int:
    """Follow a run until it ends. Returns 0 if it ends in the state "done", else 1.

    With ``once``, prints the run's current state and returns 0. Raises PlanError if there is no such run.
    """
    folder = find_run(text)
    if once:
        console = Console(highlight=False)
        console.print(draw(frame(folder), console.width))
        return 0
    view = Live(sys.stdout) if lively(sys.stdout) else Plain(sys.stdout)
    # Ctrl-C must end the view even if the parent process ignores this signal, as scripts do for background
    # jobs
    if isinstance(view, Live):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    state = "running"  # Ctrl-C ends only the view; the run itself continues
    try:
        last = follow(folder, view)
        state = last.state
    finally:
        if isinstance(view, Live):
            view.stop(state)
    view.note(ending(last))
    return 0 if last.state == "done" else 1


def print_doctor() -> int:
    """Print what is installed, whether it works, and which processes listen on the network. Returns 0."""
    for title, lines in sections():
        output([plain(f"{title}"), *(plain(f"  {line}") for line in lines)])
    return 0


def explain_run(text: str, wants_json: bool) -> int:
    """Print why a run learns little and what limited its speed, and return 0.

    ``text``: the run's folder or name. Raises PlanError if there is no such run.
    """
    folder = find_run(text)
    if wants_json:
        print(json.dumps(as_json(folder)))
    else:
        output(map(plain, explanation(folder)))
    return 0
