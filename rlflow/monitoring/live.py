"""The live view: a frame at the bottom of the terminal, redrawn several times a second.

Notes are printed above it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TextIO

import rich.live
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.text import Text

from rlflow.author.figures import HELD_OUT, SECONDS, Figure, Of
from rlflow.errors import printable
from rlflow.monitoring.frame import RECENT, Frame, draw
from rlflow.monitoring.plain_display import accuracy
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State
from rlflow.monitoring.secrets import masked

EVERY_SECONDS = 0.25
TRAINED = Figure(Of.ROW_OUTCOME, "trained")  # rows that an update used


def lively(stream: TextIO) -> bool:
    """Whether a stream is a terminal with a movable cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class Live:
    """A reporter that shows the run at the bottom of a terminal. ``clock`` returns the time in seconds.

    If a frame can't be drawn, the error is shown instead. If the terminal is gone, the next event raises an
    error, so that the caller drops this reporter.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._console = stream, Console(file=stream, highlight=False)
        self._clock, self._since = clock, clock()
        self._held_out = 0
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None
        self._live: rich.live.Live | None = None
        self.frame = Frame()

    def start(self, run: RunInfo) -> None:
        """Start to draw the run's frame."""
        self.note(f"run: {run.place}")
        self.frame = Frame(run.flow, run.place, done=run.done, iterations=run.iterations)
        self._held_out, self._since = run.held_out, self._clock()
        # prints of stages appear above the frame, but only if they would go to the terminal without it too
        self._live = rich.live.Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._drawn,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self._redraw(self._live)
        self._thread = threading.Thread(target=self._refresh, name="live view", daemon=True)
        self._thread.start()

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Show an iteration's numbers in the frame."""
        self._check()
        recent = (*self.frame.recent[1 - RECENT :], metrics.get(SECONDS, 0.0))
        self.frame = replace(
            self.frame,
            done=number + 1,
            metrics=metrics,
            stages=stages or self.frame.stages,
            recent=recent,
            trained=self.frame.trained + int(metrics.get(TRAINED) or 0),
        )
        self._since = self._clock()

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Show an evaluation's result in the frame, and print it as a note above."""
        self._check()
        points = dict(self.frame.curve) | ({number: metrics[HELD_OUT]} if HELD_OUT in metrics else {})
        self.frame = replace(self.frame, evaluation=metrics, evaluated=number, curve=sorted(points.items()))
        self.note(accuracy(number, metrics, self._held_out))

    def note(self, text: str) -> None:
        """Print a line above the frame."""
        self._console.print(Text(printable(masked(text))), soft_wrap=True)

    def close(self, state: State, error: str = "") -> None:
        """End the view with the run's final state."""
        self.stop(state)

    def stop(self, state: str = "running") -> None:
        """Draw a last frame with the state ``state``, and restore the terminal."""
        self.frame = replace(self.frame, state=state)
        live, self._live = self._live, None
        if live is None:
            return
        self._stop.set()
        try:
            self._redraw(live)
        finally:
            live.stop()
            if self._thread:
                self._thread.join()

    def _check(self) -> None:
        """End the view and raise the error if the drawing thread has failed."""
        if self._failed:
            self.stop()
            raise self._failed

    def _refresh(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            live = self._live
            try:
                if live is not None:
                    self._redraw(live)
            except Exception as error:  # the terminal is gone, so nothing can be drawn any more
                self._failed = error
                return

    def _redraw(self, live: rich.live.Live) -> None:
        # rich asks the standard streams for their size, but this may be another stream; some terminals report
        # an unknown size as 0
        columns, rows = os.get_terminal_size(self._stream.fileno())
        self._console.size = ConsoleDimensions(columns or 80, rows or 25)
        live.refresh()

    def _drawn(self) -> RenderableType:
        """Return the current frame as drawn, or the error if drawing fails.

        Can be called from any thread, because a frame is never changed, only replaced.
        """
        try:
            return draw(replace(self.frame, running=self._clock() - self._since), self._console.width)
        except Exception as error:
            return Text(printable(f"the live view cannot be drawn: {type(error).__name__}: {error}"))
