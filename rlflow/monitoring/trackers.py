"""Trackers: TensorBoard (in this module), Weights & Biases and MLflow.

Each uses its own library, which is imported on first use, and runs in its own thread, so that a slow disk or
server doesn't hold up the run. If a tracker fails, this is reported once and the tracker is no longer used.
"""

from __future__ import annotations

import html
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlflow.errors import PlanError, nearest
from rlflow.extras import require
from rlflow.monitoring.metric_names import renamed
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State
from rlflow.monitoring.secrets import redacted
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.signals import ending_at_once


class TensorBoard:
    """Tracks scalars, and samples as a Markdown table. Raises PlanError if tensorboard isn't installed."""

    def __init__(self) -> None:
        require("tensorboard", "trackers")
        self._module = require("torch.utils.tensorboard", "trackers")
        self._writer: Any = None

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        """Open the run's event file, and return where to find it."""
        folder = run.folder / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder), flush_secs=10)
        self._writer.add_text(
            "settings", f"<pre>{html.escape(json.dumps(settings, indent=1, default=str))}</pre>", 0
        )
        return f"{folder} (tensorboard --logdir {run.folder.parent})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, rows: Rows) -> None:
        """Write rows of samples."""
        self._writer.add_text("samples", markdown(rows), step)

    def close(self, state: State) -> None:
        """Write what is pending, and close the file."""
        self._writer.close()


def markdown(rows: Rows) -> str:
    """Return rows as a Markdown table, with the text in cells escaped."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = html.escape("" if value is None else str(value))
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"&#{ord(sign)};")
    return " ".join(text.splitlines())


NAMES = ("tensorboard", "wandb", "mlflow")
TABLE_EVERY = 10  # iterations from one table of samples to the next; samples.jsonl has all samples
WAITING = 10_000  # how many records can wait for a slow tracker
# state of a run → how many seconds closing a tracker may take
CLOSE_SECONDS = {"done": 30.0, "failed": 20.0, "interrupted": 5.0}
SLOW_SECONDS = 30.0  # if a record takes longer than this, a warning is printed


class Tracker(Protocol):
    """What a tracker must implement.

    Metrics have the names in `rlflow.monitoring.metric_names`. A step is the number of finished iterations.
    """

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        """Start to track a run, and return where to find it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, all of which are finite."""

    def table(self, step: int, rows: Rows) -> None:
        """Write rows of samples.

        The columns are prompt, completion, answer, finish and scores, or those of them that the run has.
        """

    def close(self, state: State) -> None:
        """Write what is pending, and end the run with its state."""


def tracker(name: str) -> Tracker:
    """Return the tracker ``name``. Raises PlanError if it is unknown or not installed."""
    check_tracker(name)
    from rlflow.monitoring import mlflow_store, wandb_runs

    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": wandb_runs.WandB,
        "mlflow": mlflow_store.MLflow,
    }
    return makers[name]()


def check_tracker(name: str) -> None:
    """Raise PlanError if there is no tracker ``name``."""
    if name not in NAMES:
        raise PlanError.of(
            "tracker",
            f"unknown tracker '{name}'",
            found=name,
            expected=f"one of {', '.join(NAMES)}",
            nearest=nearest(name, NAMES),
            remedy="--track tensorboard",
        )


class Background:
    """A reporter that runs a tracker in a thread of its own.

    ``say`` prints a line for the user. It is only called from the caller's thread.
    """

    def __init__(self, name: str, backend: Tracker, say: Callable[[str], None]) -> None:
        self.name, self._tracker, self._say = name, backend, say
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(WAITING)
        self._open = False  # True from the start until the end or the first failure
        self._problem = self._place = ""  # set by the thread: its failure, and where the tracker writes
        # time at which the thread began to pass its present record, on the monotonic clock; None between
        # records
        self._began: float | None = None
        self._slow = False  # whether the warning about a slow record was printed
        # set when the thread ends; used instead of ``join``, because a thread whose ``join`` was interrupted
        # counts as ended
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self, run: RunInfo) -> None:
        """Start the thread and the tracker. Secrets in the settings are masked."""
        settings = redacted(run.settings)
        self._open = True
        self._thread.start()
        self._put(lambda: self._begin(run, settings))

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Send an iteration's metrics to the tracker, and samples every TABLE_EVERY iterations."""
        tracker_metrics = renamed(metrics, {f"timing_s/{node}": seconds for node, seconds in stages.items()})
        self._put(lambda: self._tracker.log(number + 1, tracker_metrics))
        if samples and number % TABLE_EVERY == 0:
            rows = [{"iteration": number, **row} for row in samples]
            self._put(lambda: self._tracker.table(number + 1, rows))

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Send an evaluation's metrics to the tracker."""
        tracker_metrics = renamed(metrics)
        self._put(lambda: self._tracker.log(number, tracker_metrics))

    def note(self, text: str) -> None:
        """Ignore notes, which aren't tracked."""

    def close(self, state: State, error: str = "") -> None:
        """Give the tracker up to CLOSE_SECONDS to write what is pending."""
        self._put(lambda: self._tracker.close(state))
        self._put(None)
        if self._open:
            self._wait(CLOSE_SECONDS[state])
        self._report()
        self._open = False

    def _wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the thread to end. A stop signal cuts the wait short.

        If the thread is still working after that, it must not keep the process alive.
        """
        try:
            with ending_at_once():
                self._ended.wait(seconds)
            found = f"it was not finished {seconds:g} s after the run"
        except KeyboardInterrupt:
            found = "it was not finished when the run was stopped"
        if not self._ended.is_set():
            self._problem = f"{found}; all data are in metrics.jsonl and samples.jsonl of the run"
            launcher.leave_at_once()

    def _put(self, job: Callable[[], object] | None) -> None:
        self._report()
        if self._open:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self._problem = f"{WAITING} records are waiting for it"
                self._report()

    def _report(self) -> None:
        """Print what the thread has to say: where the tracker writes, that it is slow, or that it failed."""
        place, self._place = self._place, ""
        if place:
            self._say(f"{self.name}: {place}")
        began = self._began
        if self._open and not self._slow and began is not None and time.monotonic() - began > SLOW_SECONDS:
            self._slow = True
            self._say(
                f"tracker {self.name} has not answered for {time.monotonic() - began:.0f} s; it keeps trying"
            )
        if self._open and self._problem:
            self._open = False
            self._say(f"tracker {self.name} failed and is not used any more: {self._problem}")

    def _begin(self, run: RunInfo, settings: Mapping[str, Any]) -> None:
        self._place = self._tracker.start(run, settings)

    def _work(self) -> None:
        try:
            self._pass_on()
        finally:
            self._ended.set()

    def _pass_on(self) -> None:
        while self._open and (job := self._jobs.get()) is not None:
            self._began = time.monotonic()
            try:
                job()
                self._began = None
            except (Exception, SystemExit) as error:  # some libraries exit instead of raising
                self._problem = f"{type(error).__name__}: {error}"
                return
