"""The reporter that writes status.json and notes.txt for `rlflow runs`, `show` and `watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlflow.checkpoints.logs import Log
from rlflow.errors import printable
from rlflow.monitoring import status
from rlflow.monitoring.metric_names import plainly
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State
from rlflow.monitoring.secrets import masked

NOTES = "notes.txt"
LONGEST_NOTE = 2000
# at least this many seconds between two writes of an iteration; metrics.jsonl has every iteration
EVERY_SECONDS = 1.0


class Recorder:
    """Keeps the run's recorded state up to date. ``clock`` returns the time in seconds.

    If the disk is full, ``say`` is called once with a message, and each later event tries to write again.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._written = say, clock, clock()
        self._run: RunInfo | None = None
        self._status: status.Status | None = None
        self._complained = False
        self._early: list[str] = []  # notes that came before the run had a folder
        self._notes: Log | None = None

    def start(self, run: RunInfo) -> None:
        """Write the run's state, and any notes that came before the start."""
        self._run = run
        self._notes = Log(run.folder / NOTES, self._complain)
        self._put(replace(status.begun(run.flow, run.iterations), iteration=run.done))
        for text in self._early:
            self.note(text)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Write how many iterations are finished, at most once every EVERY_SECONDS."""
        if self._status:
            self._status = replace(self._status, iteration=number + 1)
            if self._clock() - self._written >= EVERY_SECONDS:
                # don't wait for the disk, because the next write comes within seconds
                self._put(self._status, flush=False)

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Write an evaluation's result."""
        if self._status:
            self._put(replace(self._status, iteration=number, evaluation=plainly(metrics)))

    def note(self, text: str) -> None:
        """Add a note to notes.txt, with secrets masked."""
        if self._run is None:
            self._early.append(text)
        # notes after the end are the summary, which isn't recorded
        elif self._notes and self._status and self._status.state == "running":
            line = printable(masked(text)[:LONGEST_NOTE]).replace("\n", "\n  ")
            self._notes.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    def close(self, state: State, error: str = "") -> None:
        """Write how the run ended."""
        if self._status and self._status.state == "running":
            # skipped iterations are not reported, so a finished run records the planned number
            iterations = self._status.iterations if state == "done" else self._status.iteration
            self._put(
                replace(
                    self._status,
                    state=state,
                    iteration=iterations,
                    error=printable(masked(error)[:LONGEST_NOTE]),
                )
            )
            if self._notes:
                self._notes.close()

    def _put(self, new: status.Status, flush: bool = True) -> None:
        assert self._run is not None
        self._status, self._written = new, self._clock()
        try:
            status.write(self._run.folder, new, flush)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            place = self._run.folder if self._run else "its folder"
            self._say(f"the state of the run cannot be written to {place}: {error.strerror}")
