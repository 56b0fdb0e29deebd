"""Run a comparison. The cells take turns of a few iterations each.

The order of the cells rotates in each round, so that a disturbance of the machine affects all cells alike.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.benchmarks import peer
from rlflow.benchmarks.cells import Compiled
from rlflow.benchmarks.journal import Journal, Measured, read
from rlflow.benchmarks.measured_process import CellFailed, CellProcess
from rlflow.benchmarks.results import once
from rlflow.benchmarks.suite import Suite

Say = Callable[[str], None]
Decided = Callable[[dict[str, Measured]], bool]


@dataclass
class Arm:
    """A running cell with one of its seeds."""

    compiled: Compiled
    process: CellProcess
    processor: float  # CPU seconds that the process had used before its next turn
    # iterations done in an earlier process; added to this process's iteration numbers if it began again at
    # the first one
    counted: int = 0
    turns: int = 0  # number of turns since the cell was prepared
    ended: bool = False


class Runner:
    """Runs the cells of a suite, and records the measurements.

    ``decided``: a function that returns True once more rounds cannot change any verdict on speed. ``budget``:
    seconds after which no new turn begins; None for no limit.
    """

    def __init__(
        self,
        suite: Suite,
        cells: Sequence[Compiled],
        folder: Path,
        say: Say,
        decided: Decided,
        budget: float | None = None,
    ) -> None:
        self.suite, self.cells, self.folder, self.say, self.decided = suite, cells, folder, say, decided
        self.budget, self.limit = budget, float("inf")
        self.journal = Journal(folder)

    def run(self) -> bool:
        """Run the remaining work. Returns True if all of it was done within the budget.

        The time to create interpreters does not count.
        """
        for cell in self.cells:
            with contextlib.suppress(CellFailed):  # the failure is reported when the cell should start
                peer.interpreter(cell.file, self.say)
        if self.budget is not None:
            self.limit = time.monotonic() + self.budget
        try:
            complete = [self._seed(seed) for seed in self.suite.seeds]
            return all(complete)
        finally:
            self.journal.close()

    def over(self) -> bool:
        """Whether the budget is used up."""
        return time.monotonic() > self.limit

    def _seed(self, seed: int) -> bool:
        left = [cell for cell in self.cells if seed not in self._known(cell).done]
        if not left:
            return True
        if self.over():
            return False
        if self.suite.settings.rounds is not None and self.cells[0] not in left:
            # a failed cell that is tried again alternates with the base, because it is compared with the base
            left = [self.cells[0], *left]
        rounds = [turn.round for cell in left for turn in self._known(cell).turns if turn.seed == seed]
        arms: dict[str, Arm | None] = {}
        try:
            return self._rounds(left, arms, seed, max(rounds, default=-1) + 1)
        finally:
            for arm in filter(None, arms.values()):
                arm.process.close()

    def _prepared(self, cell: Compiled, seed: int) -> Arm | None:
        """Start a cell's process and prepare it for its first turn. Returns None if this failed."""
        folder = self.folder / "cells" / cell.key / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        process, start = None, time.monotonic()
        try:
            python = peer.interpreter(cell.file, self.say)
            process = CellProcess(python, cell.file, folder / "log.txt", self.suite.settings.deadline)
            turns = [turn for turn in self._known(cell).turns if turn.seed == seed]
            recorded = 1 + max((row["iteration"] for turn in turns for row in turn.iterations), default=-1)
            anew = self._anew(seed)
            settings = {
                "algorithm": cell.cell.algorithm,
                "flags": dict(cell.cell.flags),
                "recorded": 0 if anew else recorded,
            }
            facts = process.ask("prepare", cell=settings, folder=str(folder), seed=seed)
            self.journal.add(cell.key, seed, "facts", values=facts, seconds=time.monotonic() - start)
            return Arm(cell, process, process.use().processor, recorded if anew else 0)
        except CellFailed as failure:
            self._failed(cell, seed, failure)
            if process is not None:
                process.close()
            return None

    def _known(self, cell: Compiled) -> Measured:
        """Return a cell's measurements in the journal: turns, failures and facts."""
        return read(self.folder).get(cell.key, Measured())

    def _anew(self, seed: int) -> bool:
        """Whether a cell that is prepared again restarts with its first iteration.

        It restarts if the suite only measures speed. Each round then has the same work in every cell, and the
        weights learned so far are not needed.
        """
        turns = [turn for cell in self.cells for turn in self._known(cell).turns if turn.seed == seed]
        metric = self.suite.goal.metric
        return self.suite.settings.rounds is not None and not any(
            metric in row["metrics"] for turn in turns for row in (*turn.iterations, *turn.evaluations)
        )

    def _last(self, cells: Sequence[Compiled], seed: int, number: int) -> float:
        """Return the round before which a seed ends; infinity without a limit on rounds.

        ``number``: the next round. The first turn after each start is not timed, and does not count as one of
        the declared rounds.
        """
        rounds = self.suite.settings.rounds
        if rounds is None:
            return float("inf")
        timed = [
            {turn.round for turn in once(self._known(cell).turns) if turn.seed == seed and turn.timed}
            for cell in cells
        ]
        done = len(set.intersection(*timed))
        return number + rounds - done if number == 0 or done < rounds - 1 else number

    def _rounds(self, cells: Sequence[Compiled], arms: dict[str, Arm | None], seed: int, number: int) -> bool:
        """Run turns until every arm has ended, all rounds are done, or the verdicts are decided.

        Returns False if the budget was used up first. ``arms``: the arm of each cell by its key, or None if
        the cell failed. A cell is added at its first turn. If cells finish within one turn, only one cell is
        loaded at a time.
        """
        waiting = [cell for cell in cells if seed not in self._known(cell).done]
        again = any(seed in self._known(cell).failed for cell in waiting)
        last = self._last(cells, seed, number)
        while len(arms) < len(cells) or any((arm := arms[cell.key]) and not arm.ended for cell in waiting):
            if self.suite.settings.rounds is not None and (
                number >= last or ((arms or not again) and self.decided(read(self.folder)))
            ):
                break
            if self.over():
                return False
            # if a turn is a complete run, there is only one round, so the order rotates by seed
            turn = (self.suite.seeds.index(seed) + number) % len(cells)
            for cell in (*cells[turn:], *cells[:turn]):
                if cell.key not in arms:
                    arms[cell.key] = self._prepared(cell, seed)
                if (arm := arms[cell.key]) and not arm.ended:
                    self._turn(arm, seed, number)
            number += 1
        self._done(waiting, seed)
        return True

    def _done(self, cells: Sequence[Compiled], seed: int) -> None:
        """Record that a seed is finished, for each cell that has turns with this seed and has not failed."""
        for cell in cells:
            measured = self._known(cell)
            if seed not in {*measured.done, *measured.failed} and any(
                turn.seed == seed for turn in measured.turns
            ):
                self.journal.add(cell.key, seed, "done")

    def _turn(self, arm: Arm, seed: int, number: int) -> None:
        """Run and record one turn of an arm. If the turn fails, the arm ends."""
        settings, load, start = self.suite.settings, os.getloadavg()[0], time.monotonic()
        try:
            result = following(arm.process.ask("iterate", count=settings.block), arm.counted)
            use, seconds = arm.process.use(), time.monotonic() - start
            warm = settings.rounds is not None and arm.turns == 0
            timed = [] if warm else [row["iteration"] for row in result["iterations"][settings.settle :]]
            self.journal.add(
                arm.compiled.key,
                seed,
                "turn",
                round=number,
                iterations=result["iterations"],
                evaluations=result["evaluations"],
                processor=use.processor - arm.processor,
                memory=use.memory,
                load=load,
                timed=timed,
                seconds=seconds,
            )
            arm.processor, arm.turns, arm.ended = use.processor, arm.turns + 1, result["ended"]
            self.journal.add(arm.compiled.key, seed, "observed", values=arm.process.ask("observe"))
            self.say(line(arm, seed, number, result))
            if arm.ended:
                self.journal.add(arm.compiled.key, seed, "done")
                arm.process.close()
        except CellFailed as failure:
            self._failed(arm.compiled, seed, failure)
            arm.ended = True
            arm.process.close()

    def _failed(self, cell: Compiled, seed: int, failure: CellFailed) -> None:
        self.journal.add(cell.key, seed, "failed", cause=str(failure))
        self.say(f"{cell.cell.name}, seed {seed} failed: {str(failure).splitlines()[0]}")


def following(result: dict[str, Any], counted: int) -> dict[str, Any]:
    """Add ``counted`` to the iteration numbers in a system's answer to `iterate`, and return the answer."""
    numbered = {
        part: [{**row, "iteration": row["iteration"] + counted} for row in result[part]]
        for part in ("iterations", "evaluations")
    }
    return {**result, **numbered}


def line(arm: Arm, seed: int, number: int, result: dict[str, Any]) -> str:
    """Return the progress line for a turn. ``number``: the round. ``result``: the answer to `iterate`."""
    rows = result["iterations"]
    seconds = sum(row["wall"] for row in rows)
    last = f", to iteration {rows[-1]['iteration']}" if rows else ""
    return (
        f"round {number}, {arm.compiled.cell.name}, seed {seed}: {len(rows)} iterations in "
        f"{seconds:.1f} s{last}"
    )


def stderr(text: str) -> None:
    """Print a progress line to standard error."""
    print(text, file=sys.stderr, flush=True)
