"""The reporter for pipes and logs.

It prints a line for the first and last iteration, and at most one every few seconds in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rlflow.author.figures import SCORE, SECONDS, Of
from rlflow.errors import printable
from rlflow.monitoring.metric_names import accuracies, is_mean, share
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State
from rlflow.monitoring.secrets import masked

EVERY_SECONDS = 3.0
SHOWN = {
    (Of.UPDATE, "loss"),
    (Of.NODE, "kept"),
    (Of.ROWS, "response/length"),
    (Of.ROWS, "response/truncated"),
}


class Plain:
    """A reporter that prints lines to a stream. ``clock`` returns the time in seconds."""

    def __init__(
        self, stream: TextIO, run: RunInfo | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._run, self._clock = stream, run, clock
        self._printed = 0.0

    def start(self, run: RunInfo) -> None:
        """Print the run's folder."""
        self._run = run
        self.note(f"run: {run.place}")

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Print a line about an iteration, unless one was printed less than EVERY_SECONDS ago.

        The first and last iteration are always printed.
        """
        total, now = self._run.iterations if self._run else 0, self._clock()
        if number == 0 or number + 1 == total or now - self._printed >= EVERY_SECONDS:
            self._printed = now
            self.note(f"{number + 1:>5}/{total} done  {progress(metrics)}")

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Print a line about an evaluation."""
        self.note(accuracy(number, metrics, self._run.held_out if self._run else 0))

    def note(self, text: str) -> None:
        """Print a line with secrets masked."""
        print(printable(masked(text)), file=self._stream, flush=True)

    def close(self, state: State, error: str = "") -> None:
        """Do nothing. The command itself prints how the run ended."""


def accuracy(number: int, metrics: Metrics, held_out: int = 0) -> str:
    """Return the line about an evaluation after ``number`` iterations.

    ``held_out``: how many prompts were evaluated, or 0 if unknown.
    """
    shares = ", ".join(f"{name} {share(value)}" for name, value in accuracies(metrics).items())
    count = f" of {held_out}" if held_out else ""
    score = f", mean score {metrics[SCORE]:.3g}" if SCORE in metrics else ""
    return f"held-out accuracy after {number} iterations: {shares}{count}{score}"


def progress(metrics: Metrics) -> str:
    """Return an iteration's most important numbers in one line."""
    shown = [
        figure
        for figure in metrics
        if is_mean(figure) or figure.of is Of.SOURCE or (figure.of, figure.name) in SHOWN
    ]
    shown.sort(key=lambda figure: figure.of in (Of.ROWS, Of.SOURCE))
    seconds = f"  {metrics[SECONDS]:.2f} s" if SECONDS in metrics else ""
    return "  ".join(f"{figure.key} {metrics[figure]:.3g}" for figure in shown) + seconds
