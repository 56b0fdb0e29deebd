"""Running a comparison: cells take turns of a few iterations in an order that rotates, so that what disturbs the machine disturbs all."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.bench import peer
from rlflow.bench.cells import Compiled
from rlflow.bench.journal import Journal, Measured, read
from rlflow.bench.process import CellFailed, CellProcess
from rlflow.bench.suite import Suite

Say = Callable[[str], None]
Decided = Callable[[dict[str, Measured]], bool]


@dataclass
class Arm:
    """A cell that runs with a seed."""

    compiled: Compiled
    process: CellProcess
    processor: float  # seconds of processor time that it had used before its next turn
    turns: int = 0  # since it was prepared
    ended: bool = False


class Runner:
    """Runs the cells of a suite and records what is measured. ``decided``: whether more rounds would change no verdict of speed.

    budget: seconds after which no further turn begins; None: no end."""

    def __init__(
        self, suite: Suite, cells: Sequence[Compiled], folder: Path, say: Say, decided: Decided, budget: float | None = None
    ) -> None:
        self.suite, self.cells, self.folder, self.say, self.decided = suite, cells, folder, say, decided
        self.budget, self.limit = budget, float("inf")
        self.journal = Journal(folder)

    def run(self) -> bool:
        """Run all that is left to do. Whether everything was done within the budget, of which making interpreters takes nothing."""
        for cell in self.cells:
            with contextlib.suppress(CellFailed):  # told where the cell would begin
                peer.interpreter(cell.file, self.say)
        if self.budget is not None:
            self.limit = time.monotonic() + self.budget
        try:
            whole = [self._seed(seed) for seed in self.suite.seeds]
            return all(whole)
        finally:
            self.journal.close()

    def over(self) -> bool:
        """Whether the budget is used up."""
        return time.monotonic() > self.limit

    def _seed(self, seed: int) -> bool:
        known = read(self.folder)
        left = [cell for cell in self.cells if seed not in known.get(cell.key, Measured()).done]
        if not left:
            return True
        if self.over():
            return False
        rounds = [turn.round for cell in left for turn in known.get(cell.key, Measured()).turns if turn.seed == seed]
        arms: list[Arm] = []
        try:
            for cell in left:
                if arm := self._prepared(cell, seed):
                    arms.append(arm)
            return self._rounds(arms, seed, max(rounds, default=-1) + 1)
        finally:
            for arm in arms:
                arm.process.close()

    def _prepared(self, cell: Compiled, seed: int) -> Arm | None:
        """A cell that waits for its first turn; None where it failed."""
        folder = self.folder / "cells" / cell.key / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        process = None
        try:
            python = peer.interpreter(cell.file, self.say)
            process = CellProcess(python, cell.file, folder / "log.txt", self.suite.settings.deadline)
            settings = {"algorithm": cell.cell.algorithm, "flags": dict(cell.cell.flags)}
            facts = process.ask("prepare", cell=settings, folder=str(folder), seed=seed)
            self.journal.add(cell.key, seed, "facts", values=facts)
            return Arm(cell, process, process.use().processor)
        except CellFailed as failure:
            self._failed(cell, seed, failure)
            if process is not None:
                process.close()
            return None

    def _rounds(self, arms: list[Arm], seed: int, number: int) -> bool:
        """Turns until every arm has ended, the rounds are done or their verdicts are. Whether that was within the budget."""
        rounds = self.suite.settings.rounds
        while arms and not all(arm.ended for arm in arms):
            if rounds is not None and (number >= rounds or self.decided(read(self.folder))):
                break
            if self.over():
                return False
            turn = number % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                if not arm.ended:
                    self._turn(arm, seed, number)
            number += 1
        for arm in arms:
            if arm.process.process.poll() is None:
                self.journal.add(arm.compiled.key, seed, "done")
        return True

    def _turn(self, arm: Arm, seed: int, number: int) -> None:
        """One turn of an arm, recorded. One that fails has ended."""
        settings, load = self.suite.settings, os.getloadavg()[0]
        try:
            result = arm.process.ask("iterate", count=settings.block)
            use = arm.process.use()
            warm = settings.rounds is not None and arm.turns == 0
            timed = [] if warm else [row["iteration"] for row in result["iterations"][settings.settle :]]
            self.journal.add(arm.compiled.key, seed, "turn", round=number, iterations=result["iterations"],
                             evaluations=result["evaluations"], processor=use.processor - arm.processor, memory=use.memory, load=load,
                             timed=timed)
            arm.processor, arm.turns, arm.ended = use.processor, arm.turns + 1, result["ended"]
            self.journal.add(arm.compiled.key, seed, "observed", values=arm.process.ask("observe"))
            self.say(line(arm, seed, number, result))
        except CellFailed as failure:
            self._failed(arm.compiled, seed, failure)
            arm.ended = True
            arm.process.close()

    def _failed(self, cell: Compiled, seed: int, failure: CellFailed) -> None:
        self.journal.add(cell.key, seed, "failed", cause=str(failure))
        self.say(f"{cell.cell.name}, seed {seed} failed: {str(failure).splitlines()[0]}")


def line(arm: Arm, seed: int, number: int, result: dict[str, Any]) -> str:
    """A turn in words."""
    rows = result["iterations"]
    seconds = sum(row["wall"] for row in rows)
    last = f", to iteration {rows[-1]['iteration']}" if rows else ""
    return f"round {number}, {arm.compiled.cell.name}, seed {seed}: {len(rows)} iterations in {seconds:.1f} s{last}"


def stderr(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
