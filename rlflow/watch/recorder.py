"""What a run leaves for `rlflow runs`, `show` and `watch`: its state in status.json, and what was said in notes.txt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlflow.errors import printable
from rlflow.logs import Log
from rlflow.watch import status
from rlflow.watch.reporter import Metrics, Rows, RunInfo, State
from rlflow.watch.secrets import masked

NOTES = "notes.txt"
LONGEST_NOTE = 2000
EVERY_SECONDS = 1.0  # between iterations that are written: metrics.jsonl has them all


class Recorder:
    """Keeps the state current. A full disk is said once, and tried again each time: it may be emptied."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._written = say, clock, clock()
        self._run: RunInfo | None = None
        self._status: status.Status | None = None
        self._told = False
        self._early: list[str] = []  # notes from before the run had a folder
        self._notes: Log | None = None

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._notes = Log(run.folder / NOTES, self._complain)
        self._put(replace(status.begun(run.flow, run.iterations), iteration=run.done))
        for text in self._early:
            self.note(text)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        if self._status:
            self._status = replace(self._status, iteration=number + 1)
            if self._clock() - self._written >= EVERY_SECONDS:
                self._put(self._status, flush=False)  # the next one comes in a second

    def evaluation(self, number: int, metrics: Metrics) -> None:
        if self._status:
            self._put(replace(self._status, iteration=number, evaluation=dict(metrics)))

    def note(self, text: str) -> None:
        if self._run is None:
            self._early.append(text)
        elif self._notes and self._status and self._status.state == "running":  # the summary that follows the end is no part of the story
            line = printable(masked(text)[:LONGEST_NOTE]).replace("\n", "\n  ")
            self._notes.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    def close(self, state: State, error: str = "") -> None:
        if self._status and self._status.state == "running":
            done = self._status.iterations if state == "done" else self._status.iteration  # skipped ones were never told
            self._put(replace(self._status, state=state, iteration=done, error=printable(masked(error)[:LONGEST_NOTE])))
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
        if not self._told:
            self._told = True
            where = self._run.folder if self._run else "its folder"
            self._say(f"the state of the run cannot be written to {where}: {error.strerror}")
