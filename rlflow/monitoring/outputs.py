"""Combine the reporters that a run's flags ask for into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rlflow.monitoring.reporter import Quiet, Reporter, Several, complain


def make_reporter(
    quiet: bool = False,
    as_json: bool = False,
    track: Sequence[str] = (),
    stream: TextIO | None = None,
    metrics_port: int | None = None,
) -> Reporter:
    """Return a run's reporter.

    It combines a view that suits the stream, the run's own records, each tracker in ``track``, and a server
    for metrics on ``metrics_port``. Raises PlanError right away if a tracker is unknown or not installed, or
    if the port is in use.
    """
    from rlflow.monitoring.live import Live, lively
    from rlflow.monitoring.plain_display import Plain
    from rlflow.monitoring.recorder import Recorder
    from rlflow.monitoring.scraped import Scraped
    from rlflow.monitoring.trackers import Background, tracker

    # standard output is reserved for the line of JSON
    stream = stream or (sys.stderr if as_json else sys.stdout)
    trackers = [(name, tracker(name)) for name in dict.fromkeys(track)]
    view: Reporter = Quiet() if quiet else Live(stream) if lively(stream) else Plain(stream)
    say: Callable[[str], None] = complain if quiet else view.note
    background: list[Reporter] = [
        Recorder(say),
        *(Background(name, backend, say) for name, backend in trackers),
    ]
    background += [Scraped(int(metrics_port))] if metrics_port is not None else []
    return Several(view, background, None if quiet else lambda run: Plain(stream, run))
