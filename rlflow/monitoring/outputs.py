"""What shows and records a run, as its flags choose it: one reporter made of several."""

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
    """The reporter of a run: a view that fits the stream, the run's own records, each tracker of ``track``,
    and the server of ``metrics_port``.

    Raises PlanError for a tracker that is unknown or not installed, and a port that is taken: before the run,
    not within it.
    """
    from rlflow.monitoring.live import Live, lively
    from rlflow.monitoring.plain_display import Plain
    from rlflow.monitoring.recorder import Recorder
    from rlflow.monitoring.scraped import Scraped
    from rlflow.monitoring.trackers import Background, tracker

    # the last line of standard output is the JSON alone
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
