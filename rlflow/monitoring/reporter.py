"""Reporters, which show or record a run as it happens.

A reporter that raises is dropped with a note, and the run goes on.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rlflow.author.figures import Figure
from rlflow.errors import printable
from rlflow.monitoring.secrets import masked

State = Literal["done", "failed", "interrupted"]
Metrics = Mapping[Figure, float]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunInfo:
    """What reporters need to know when a run starts."""

    folder: Path
    flow: str
    iterations: int  # number of planned iterations
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings as in settings.json
    held_out: int = 0  # number of held-out prompts in an evaluation
    done: int = 0  # number of iterations that a resumed run had already finished
    shown: str = ""  # a short path of the folder, relative to where the run was started

    @property
    def place(self) -> str:
        """The run's folder as the user would write it."""
        return self.shown or str(self.folder)


class Reporter(Protocol):
    """What a reporter must implement to receive a run's events.

    Iterations are numbered from 0, as in metrics.jsonl.
    """

    def start(self, run: RunInfo) -> None:
        """Called when the run starts. Its folder exists, and the first iteration comes next."""

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Called after each iteration.

        ``stages``: the seconds of each node. ``metrics[SECONDS]``: the seconds of the whole iteration.
        """

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Called after an evaluation that follows ``number`` iterations."""

    def note(self, text: str) -> None:
        """Show a line to the user. Notes can come before the run starts and after it ends."""

    def close(self, state: State, error: str = "") -> None:
        """Called when the run ends. A second call has no effect."""


class Quiet:
    """A reporter that does nothing."""

    def start(self, run: RunInfo) -> None:
        """Do nothing."""

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Do nothing."""

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def close(self, state: State, error: str = "") -> None:
        """Do nothing."""


class Several:
    """Reports events to several reporters, the first of which is the view.

    A reporter that raises is dropped, except that the view is replaced with ``spare`` the first time.

    Only one thread reports at a time. A signal handler can interrupt a thread that is reporting and report an
    event of its own. That event waits until the first one is done, because streams and locks aren't
    reentrant.
    """

    def __init__(
        self,
        view: Reporter,
        others: Iterable[Reporter] = (),
        spare: Callable[[RunInfo | None], Reporter] | None = None,
    ) -> None:
        self._parts: list[Reporter] = [view, *others]
        self._spare = spare
        self._run: RunInfo | None = None
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._turn = threading.RLock()
        self._passing_thread: int | None = None

    def start(self, run: RunInfo) -> None:
        """Tell each reporter that the run has started."""
        self._run = run
        self._each("start", run)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Tell each reporter about an iteration."""
        self._each("iteration", number, metrics, samples, stages)

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Tell each reporter about an evaluation."""
        self._each("evaluation", number, metrics)

    def note(self, text: str) -> None:
        """Send a note to each reporter."""
        self._each("note", text)

    def close(self, state: State, error: str = "") -> None:
        """Tell each reporter that the run has ended."""
        self._each("close", state, error)

    def _each(self, method: str, *values: Any) -> None:
        self._waiting.append((method, values))
        if self._passing_thread == threading.get_ident():
            return
        with self._turn:
            self._passing_thread = threading.get_ident()
            try:
                while self._waiting:
                    method, values = self._waiting.popleft()
                    self._call_parts(method, values)
            finally:
                self._passing_thread = None

    def _call_parts(self, method: str, values: tuple[Any, ...]) -> None:
        for part in list(self._parts):
            try:
                getattr(part, method)(*values)
            except Exception as error:  # whatever a reporter raises must not end the run
                self._drop(part, error)

    def _drop(self, part: Reporter, error: Exception) -> None:
        place = self._parts.index(part)
        self._parts.remove(part)
        if place == 0 and self._spare is not None:
            self._parts.insert(0, self._spare(self._run))
            self._spare = None
        self.note(
            f"{type(part).__name__.lower()} failed and is not used any more: {type(error).__name__}: {error}"
        )


def alarm(reporter: Reporter, text: str) -> None:
    """Report that data was lost or is about to be. With --quiet, this goes to standard error."""
    reporter.note(text)
    view = reporter._parts[0] if isinstance(reporter, Several) and reporter._parts else reporter
    if isinstance(view, Quiet):
        complain(text)


def complain(text: str) -> None:
    """Print a line to standard error, with secrets masked, even with --quiet."""
    print(printable(masked(text)), file=sys.stderr, flush=True)
