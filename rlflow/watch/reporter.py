"""Reporters: what a run tells while it goes, and to whom. No reporter ends a run; one that fails is left out, and that is said once."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rlflow.errors import printable
from rlflow.watch.secrets import masked

State = Literal["done", "failed", "interrupted"]
Metrics = Mapping[str, float]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunInfo:
    """A run as it starts. ``settings`` as in settings.json; ``held_out``: how many prompts an evaluation has; ``done``: how many
    iterations were behind it when it was resumed; ``shown``: its folder as it is best written where the run was started."""

    folder: Path
    flow: str
    iterations: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    held_out: int = 0
    done: int = 0
    shown: str = ""

    @property
    def place(self) -> str:
        """The folder, for people."""
        return self.shown or str(self.folder)


class Reporter(Protocol):
    """Something that is told how a run goes. Iterations count from 0, as in metrics.jsonl."""

    def start(self, run: RunInfo) -> None:
        """The run's folder is there and its first iteration is ahead."""

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """An iteration ended. ``stages``: seconds by node; ``metrics["seconds"]`` is the iteration's own."""

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """An evaluation after ``number`` iterations."""

    def note(self, text: str) -> None:
        """A line for people. Comes before the start and after the end as well."""

    def close(self, state: State, error: str = "") -> None:
        """The run ended. Called once more it does nothing."""


class Quiet:
    """Says nothing."""

    def start(self, run: RunInfo) -> None: ...

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None: ...

    def evaluation(self, number: int, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self, state: State, error: str = "") -> None: ...


class Several:
    """Tells each of its parts, the view first. A part that raises is left out from then on; a view gives way to ``spare``, once.

    Threads take turns. What a signal's handler tells while its own thread is telling waits until that is done: streams and locks can
    not be entered twice.
    """

    def __init__(self, view: Reporter, others: Iterable[Reporter] = (), spare: Callable[[RunInfo | None], Reporter] | None = None) -> None:
        self._parts: list[Reporter] = [view, *others]
        self._spare = spare
        self._run: RunInfo | None = None
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._turn = threading.RLock()
        self._teller: int | None = None

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._each("start", run)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        self._each("iteration", number, metrics, samples, stages)

    def evaluation(self, number: int, metrics: Metrics) -> None:
        self._each("evaluation", number, metrics)

    def note(self, text: str) -> None:
        self._each("note", text)

    def close(self, state: State, error: str = "") -> None:
        self._each("close", state, error)

    def _each(self, verb: str, *values: Any) -> None:
        self._waiting.append((verb, values))
        if self._teller == threading.get_ident():
            return
        with self._turn:
            self._teller = threading.get_ident()
            try:
                while self._waiting:
                    verb, values = self._waiting.popleft()
                    self._tell(verb, values)
            finally:
                self._teller = None

    def _tell(self, verb: str, values: tuple[Any, ...]) -> None:
        for part in list(self._parts):
            try:
                getattr(part, verb)(*values)
            except Exception as error:  # whatever it is: a run is worth more than what is said of it
                self._leave_out(part, error)

    def _leave_out(self, part: Reporter, error: Exception) -> None:
        place = self._parts.index(part)
        self._parts.remove(part)
        if place == 0 and self._spare is not None:
            self._parts.insert(0, self._spare(self._run))
            self._spare = None
        self.note(f"{type(part).__name__.lower()} failed and is left out from here on: {type(error).__name__}: {error}")


def make_reporter(quiet: bool = False, as_json: bool = False, track: Sequence[str] = (), stream: TextIO | None = None) -> Reporter:
    """The reporter of a run: a view that fits the stream, the run's own records, and each tracker of ``track``.

    Raises PlanError for a tracker that is unknown or not installed: before the run, not within it.
    """
    from rlflow.watch.live import Live, lively
    from rlflow.watch.plain import Plain
    from rlflow.watch.recorder import Recorder
    from rlflow.watch.trackers import Background, tracker

    stream = stream or (sys.stderr if as_json else sys.stdout)  # the last line of standard output is the JSON alone
    trackers = [(name, tracker(name)) for name in dict.fromkeys(track)]
    view: Reporter = Quiet() if quiet else Live(stream) if lively(stream) else Plain(stream)
    say: Callable[[str], None] = complain if quiet else view.note
    others: list[Reporter] = [Recorder(say), *(Background(name, made, say) for name, made in trackers)]
    return Several(view, others, None if quiet else lambda run: Plain(stream, run))


def alarm(reporter: Reporter, text: str) -> None:
    """Say what must be heard even with --quiet: something of the run is lost, or will be."""
    reporter.note(text)
    view = reporter._parts[0] if isinstance(reporter, Several) and reporter._parts else reporter
    if isinstance(view, Quiet):
        complain(text)


def complain(text: str) -> None:
    """What is said even by --quiet: that something is left out."""
    print(printable(masked(text)), file=sys.stderr, flush=True)
