"""Reporters, which show or record a run while it runs.

If a reporter raises, it is dropped with a note, and the run continues.
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
    """What reporters need to know about a run when it starts."""

    folder: Path
    flow: str
    iterations: int  # number of planned iterations
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings as in settings.json
    held_out: int = 0  # number of held-out prompts in an evaluation
    done: int = 0  # number of iterations that a resumed run had already finished
    shown: str = ""  # the folder as a short path, relative to the folder in which the run was started

    @property
    def place(self) -> str:
        """The run's folder as the user writes it."""
        return self.shown or str(self.folder)


class Reporter(Protocol):
    """The interface of a reporter, which receives the events of a run.

    Iterations count from 0, as in metrics.jsonl.
    """

    def start(self, run: RunInfo) -> None:
        """Handle the start of the run. Its folder exists, and its first iteration comes next."""

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Handle the end of an iteration.

        ``stages``: the seconds of each node. ``metrics[SECONDS]``: the seconds of the complete iteration.
        """

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Handle the end of an evaluation after ``number`` iterations."""

    def note(self, text: str) -> None:
        """Show a line to the user. Notes may come before the run's start and after its end."""

    def close(self, state: State, error: str = "") -> None:
        """Handle the end of the run. A second call has no effect."""


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
    """Passes events to several reporters, of which the first is the view.

    If a reporter raises, it is dropped. A view that raises is replaced once, by ``spare``.

    Only one thread passes events at a time. A signal handler may report an event while its own thread is
    passing another event. The new event then waits, since streams and locks are not reentrant.
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
        """Pass the start to each reporter."""
        self._run = run
        self._each("start", run)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Pass an iteration to each reporter."""
        self._each("iteration", number, metrics, samples, stages)

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Pass an evaluation to each reporter."""
        self._each("evaluation", number, metrics)

    def note(self, text: str) -> None:
        """Pass a note to each reporter."""
        self._each("note", text)

    def close(self, state: State, error: str = "") -> None:
        """Pass the end to each reporter."""
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
    """Report that data are lost or will be lost soon. With --quiet, this goes to standard error."""
    reporter.note(text)
    view = reporter._parts[0] if isinstance(reporter, Several) and reporter._parts else reporter
    if isinstance(view, Quiet):
        complain(text)


def complain(text: str) -> None:
    """Print a line to standard error with secrets masked. --quiet does not suppress it."""
    print(printable(masked(text)), file=sys.stderr, flush=True)
