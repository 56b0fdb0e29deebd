"""The system `rlflow`: a cell that is an `rlflow run` with its normal records.

The run waits between turns.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.author.load import load_flow
from rlflow.checkpoints.logs import Growing, objects
from rlflow.execution.account import RowAccount
from rlflow.monitoring.metric_names import plainly
from rlflow.monitoring.recorder import Recorder
from rlflow.monitoring.reporter import Metrics, Quiet, Reporter, Rows, RunInfo, Several, State
from rlflow.runs import outcomes
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.records import TRAFFIC
from rlflow.runs.resume import resume
from rlflow.runs.session import start_run

NAME = "run"  # name of the run's folder inside the cell's folder


class Turns(Quiet):
    """A reporter that pauses the run between turns, and keeps the measurements of iterations.

    The seconds of an iteration are the wall time since the end of the previous iteration, with recording and
    saving but without evaluations. Sampling ahead of training is not paused. The first iteration of a turn
    may therefore have started during the turns of other cells.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = 0
        self.ended = False
        self._mark = time.perf_counter()
        self._iterations: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []

    def start(self, run: RunInfo) -> None:
        """Wait for the first turn."""
        self._wait()

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Record an iteration. After the last iteration of a turn, wait for the next turn."""
        now = time.perf_counter()
        finite = {
            name: value
            for name, value in plainly(metrics).items()
            if value == value and abs(value) != float("inf")
        }
        with self._changed:
            self._iterations.append({"iteration": number, "wall": now - self._mark, "metrics": finite})
            self._left -= 1
            self._changed.notify_all()
        self._wait()

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Record an evaluation, whose time does not count."""
        with self._changed:
            self._evaluations.append({"iteration": number, "metrics": plainly(metrics)})
        self._mark = time.perf_counter()

    def close(self, state: State, error: str = "") -> None:
        """Mark the run as ended."""
        self.end()

    def end(self) -> None:
        """Mark the run as ended, and wake all waiting threads."""
        with self._changed:
            self.ended = True
            self._left = 1 << 30
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0)
        self._mark = time.perf_counter()

    def go(self, count: int) -> None:
        """Allow the run ``count`` more iterations."""
        with self._changed:
            self._left += count
            self._changed.notify_all()

    def done(self, to_the_end: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Wait until the turn has ended, and return its (iterations, evaluations).

        ``to_the_end``: whether to wait for the end of the run instead.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (not to_the_end and self._left <= 0))
            turn = self._iterations, self._evaluations
            self._iterations, self._evaluations = [], []
        return turn


class System:
    """A run of rlflow in a thread of this process.

    The cell gives the algorithm and the flags of `rlflow run`.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Load models and data, and start or resume the run.

        Returns {"iterations": the run's total number of iterations}. A run that was started before resumes
        from the newest checkpoint with at most ``cell["recorded"]`` iterations.
        """
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the rlflow command sets it
        self.folder, self.turns, self.error = Path(folder) / NAME, Turns(), ""
        self.reporter: Reporter = Several(self.turns, [Recorder(print)])
        flow = load_flow(cell["algorithm"])
        values = {**cell["flags"], "seed": seed, "out": folder, "name": NAME}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        config, hp = resolve_config(flow, None, values)
        self.iterations = config.options.iterations
        if checkpoints(self.folder, cell.get("recorded")):
            self.thread = threading.Thread(
                target=self._run, args=(lambda: resume(self.folder, {}, self.reporter),)
            )
        else:
            begin_anew(self.folder)
            context = prepare(flow, hp, config, self.reporter.note)
            self.thread = threading.Thread(
                target=self._run, args=(lambda: start_run(context, self.reporter),)
            )
        self.thread.start()
        return {"iterations": self.iterations}

    def _run(self, start: Any) -> None:
        try:
            start()
        except BaseException as error:  # iterate() raises it
            self.error = str(error) or type(error).__name__
        finally:
            self.turns.end()

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations with their evaluations.

        After the last iteration, wait until the run has ended.
        """
        self.turns.go(count)
        iterations, evaluations = self.turns.done(False)
        # the last evaluation and the final models are still to come, so wait for the end
        if iterations and iterations[-1]["iteration"] == self.iterations - 1:
            self.turns.go(1)
            evaluations += self.turns.done(True)[1]
        if self.turns.ended:
            self.thread.join()
        if self.error:
            raise RuntimeError(self.error)
        tokens, moved = sampled_tokens(self.folder), moved_bytes(self.folder)
        rows = [{**row, "tokens": tokens.get(row["iteration"], 0)} for row in iterations]
        rows = [
            {**row, "bytes": moved[row["iteration"]]} if row["iteration"] in moved else row for row in rows
        ]
        return {"iterations": rows, "evaluations": evaluations, "ended": not self.thread.is_alive()}

    def observe(self) -> dict[str, Any]:
        """Return the outcomes of all sampled rows as text, and whether the row accounting adds up."""
        account = outcomes.run_account(self.folder)
        return {"fates": outcomes.outcomes_text(account), "closes": account.closes}

    def close(self) -> None:
        """If the run is not finished, end the process at once.

        This leaves the run's folder as a kill would.
        """
        if getattr(self, "thread", None) is not None and self.thread.is_alive():
            os._exit(0)


def checkpoints(folder: Path, recorded: int | None = None) -> bool:
    """Delete a run's checkpoints after ``recorded`` iterations, and return whether it can resume from another
    one.

    The iterations before such a checkpoint were measured in a turn that was killed, so they are not recorded
    and must be repeated. None: keep all checkpoints.
    """
    steps = {int(path.name.partition("-")[2]): path for path in folder.glob("checkpoints/step-*")}
    for step, path in steps.items():
        if recorded is not None and step > recorded:
            shutil.rmtree(path)
    return any(recorded is None or step <= recorded for step in steps)


def begin_anew(folder: Path) -> None:
    """Rename the folder of a run that was killed before its first checkpoint, so that the run can
    start anew.
    """
    if folder.exists():
        number = sum(1 for _ in folder.parent.glob(f"{folder.name}-killed-*"))
        folder.rename(folder.with_name(f"{folder.name}-killed-{number}"))


def sampled_tokens(folder: Path) -> dict[int, int]:
    """Return the number of tokens that all roles sampled, by iteration, from the run's row accounting."""
    tokens: dict[int, int] = {}
    for values in objects(Growing(folder / outcomes.FILE).lines()):
        tokens[values["iteration"]] = sum(
            count.tokens for count in RowAccount.from_json(values).sampled.values()
        )
    return tokens


def moved_bytes(folder: Path) -> dict[int, int]:
    """Return the bytes sent between processes, by iteration; empty for a run in one process."""
    lines = objects(Growing(folder / TRAFFIC).lines())
    sizes = {values.pop("iteration"): values for values in lines if not any("/" in name for name in values)}
    return {iteration: sum(values.values()) for iteration, values in sizes.items()}
