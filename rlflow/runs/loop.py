"""The loop over iterations: take prompts, run the plan, record, evaluate, save, tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer
from rlflow.config.options import Options
from rlflow.data.prompts import Prompts
from rlflow.errors import RemoteError, SkipIteration, Stopped
from rlflow.execution import threads
from rlflow.execution.account import Account
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor, Outcome
from rlflow.execution.lookahead import Ahead
from rlflow.plan import Plan
from rlflow.runs.bounds import RunTotals
from rlflow.runs.canary import Canary, strange
from rlflow.runs.depends import Dependencies
from rlflow.runs.evaluate import Accuracy, Evaluation, shown
from rlflow.runs.guards import Guard, mismatched, too_few
from rlflow.runs.records import Records
from rlflow.runs.recovery import Recovery, Workers
from rlflow.spans import flat
from rlflow.watch.reporter import Reporter
from rlflow.watchdog.beside import Watchdog

TOLD = 20  # records left out that are told with their places


@dataclass
class RunContext:
    """Everything that a run needs, made before its first iteration. ``files``: by trained role the small files of its model, by name.
    ``inputs``: what the run depends on beside its settings and its plan; None where that was not asked for. ``stop`` ends what was started,
    but for the watchdog. ``heard_by`` is told where what rewards print in this process's own pool of them goes."""

    plan: Plan
    engine: Engine
    executor: Executor
    prompts: Prompts
    options: Options
    evaluation: Evaluation | None
    settings: Mapping[str, Any]
    files: Mapping[str, Mapping[str, bytes]]
    inputs: Dependencies | None
    reasons: Callable[[], Mapping[str, str]]
    stop: Callable[[], None]
    watchdog: Watchdog
    ahead: Ahead | None = None
    workers: Workers | None = None
    canary: Canary | None = None
    heard_by: Callable[[Callable[[bytes], object]], object] = lambda hear: None

    def close(self) -> None:
        """End everything that was started."""
        try:
            self.stop()
        finally:
            self.watchdog.close()


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: at its first iteration, or where a checkpoint was taken. ``before`` and ``answers``: how the first weights
    did, known where the run was begun earlier; ``here``: how those do with which it begins, known where they were evaluated."""

    iteration: int = 0
    before: Accuracy | None = None
    answers: list[dict[str, str]] = field(default_factory=list)
    here: Accuracy | None = None


@dataclass
class RunResult:
    """What a run came to. ``before`` and ``after`` are None where there was nothing to evaluate. ``shown``: the folder, for people who are
    where the run was started."""

    folder: Path
    iterations: int
    seconds: float
    before: Accuracy | None
    after: Accuracy | None
    totals: RunTotals
    answers: list[dict[str, str]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    shown: str = ""

    def as_json(self) -> dict[str, Any]:
        """The last line of ``--json``."""
        return {
            "accuracy_before": self.before and self.before.sampled,
            "accuracy_after": self.after and self.after.sampled,
            "greedy_before": self.before and self.before.greedy,
            "greedy_after": self.after and self.after.greedy,
            "iterations": self.iterations,
            "seconds": round(self.seconds, 2),
            "run": str(self.folder),
            "bounds": self.totals.as_json(),
        }


T = TypeVar("T")


@dataclass(frozen=True)
class LoopTotals:
    """What a loop counts: where time went, the last metrics, iterations that were skipped, and those in a row that were bad."""

    totals: RunTotals
    last: dict[str, float]
    skipped: int
    bad: int


TakeSnapshot = Callable[[RunStart, Mapping[str, Any]], Snapshot]


class Loop:
    """One run, from its start to its end or to the request to stop. Raises Stopped after saving where it was stopped."""

    def __init__(
        self, prepared: RunContext, records: Records, writer: Writer, reporter: Reporter, take: TakeSnapshot,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """``look`` is called between iterations and raises where the run's folder is no longer there."""
        self.prepared, self.records, self.writer, self.reporter, self.take, self.look = prepared, records, writer, reporter, take, look
        self.options = prepared.options
        self.guard = Guard(prepared.options, prepared.reasons)
        self.totals = RunTotals(prepared.executor.lanes.room, prepared.options.staleness, prepared.plan.within)
        self.start = RunStart()
        self.last: dict[str, float] = {}
        self.skipped = self.told = 0
        self.evaluated: dict[int, Accuracy] = {}
        self.done = 0  # iterations, at the last look at the folder
        self.recovery = Recovery(self)

    def run(self, start: RunStart) -> RunResult:
        self.compute(threads.keep)
        with threads.alone():
            return self._run(start)

    def _run(self, start: RunStart) -> RunResult:
        began = time.monotonic()
        self.start = start
        if start.here:
            self.evaluated[start.iteration] = start.here
        after, compared = self.recovery.run(self.to_the_end, start.iteration)
        seconds = time.monotonic() - began
        return RunResult(self.records.folder, self.options.iterations, seconds, self.start.before, after, self.totals, compared, self.last,
                      self.skipped)

    def to_the_end(self, first: int) -> tuple[Accuracy | None, list[dict[str, str]]]:
        """From an iteration on, the first or the one that a worker's death threw the run back to: how the last weights did, and what they
        answer."""
        start = self.start
        self.start = replace(start, before=start.before or self.evaluate(first), answers=start.answers or self.answers())
        for iteration in range(first, self.options.iterations):
            self.step(iteration)
        after = self.evaluate(self.options.iterations)
        last = self.answers()
        self.done = self.options.iterations
        self.look()
        if first < self.options.iterations:  # else that is where the run was resumed
            self.save(self.options.iterations, self.prepared.prompts.state())
        pairs = zip(self.start.answers, last, strict=True)
        compared = [one | {"before": one["completion"], "after": other["completion"]} for one, other in pairs]
        self.records.answers(compared)
        return after, compared

    def account(self) -> LoopTotals:
        """What the loop itself has counted so far."""
        return LoopTotals(deepcopy(self.totals), self.last, self.skipped, self.guard.bad)

    def back_to(self, iteration: int, account: LoopTotals) -> None:
        """Forget an iteration and those after it; ``account`` is from before."""
        self.totals, self.last, self.skipped, self.guard.bad = deepcopy(account.totals), account.last, account.skipped, account.bad
        self.evaluated = {number: accuracy for number, accuracy in self.evaluated.items() if number <= iteration}
        self.records.back_to(iteration)

    def step(self, iteration: int) -> None:
        """One iteration, the evaluation that is due after it, and the checkpoint that is due after both."""
        cursor, self.prepared.engine.iteration = self.prepared.prompts.state(), iteration
        self._end_where_lost(iteration, cursor)
        self.recovery.commit(iteration)
        self.done = iteration
        self.look()
        try:
            if self.prepared.executor.stopping:
                raise Stopped
            self.iterate(iteration)
        except Stopped:
            self.save(iteration, cursor)
            raise
        done, options = iteration + 1, self.options
        if options.eval_every and done % options.eval_every == 0 and done < options.iterations:
            self.evaluate(done)
        if options.save_every and done % options.save_every == 0 and done < options.iterations:
            self.save(done, self.prepared.prompts.state())

    def _end_where_lost(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        """While workers still answer without what started them, the run can be saved. Raises RemoteError."""
        lost = self.prepared.workers.lost() if self.prepared.workers else None
        if lost is not None:
            self.save(iteration, cursor)
            raise RemoteError(lost)

    def outcome(self, iteration: int) -> Outcome:
        prepared = self.prepared
        if prepared.ahead is None:
            cursor = prepared.prompts.state()
            outcome = prepared.executor.run(prepared.plan, prepared.prompts.take(self.options.prompts))
            outcome.metrics |= prepared.prompts.left_out(cursor)
            return outcome
        try:
            sampled = prepared.ahead.advance(iteration)
            return prepared.executor.run(prepared.plan, sampled.prompts, sampled)
        finally:
            if not prepared.executor.stopping:
                prepared.ahead.done(iteration)

    def iterate(self, iteration: int) -> None:
        canaries = self.compute(partial(self.prepared.canary, iteration)) if self.prepared.canary else {}
        start = time.monotonic()
        try:
            outcome = self.outcome(iteration)
        except SkipIteration as skip:
            self.skipped += 1
            self.records.account(iteration, skip.account if isinstance(skip.account, Account) else None)
            self.reporter.note(f"iteration {iteration} is skipped: {skip}")
            return
        seconds = time.monotonic() - start
        self.prepared.engine.state |= outcome.state
        self.totals.add(outcome.spans, start, seconds)
        if moved := self.prepared.engine.moved():
            self.records.weights(moved)
        self.last = outcome.metrics | outcome.summary.health | canaries | speed(outcome) | outcome.state | {"seconds": seconds}
        samples = outcome.summary.rows
        self.records.metrics(iteration, self.last)
        self.records.account(iteration, outcome.account)
        self.records.samples(iteration, samples)
        self.records.timeline(iteration, outcome)
        odd = strange(canaries, self.options.max_mismatch, self.options.dtype)
        told = [*too_few(self.prepared.plan, self.last), *mismatched(self.options, self.last), *odd, *self.passed_over()]
        try:
            self.guard.check(iteration, self.last, outcome.summary)
            self.reporter.iteration(iteration, self.last, samples, stage_seconds(outcome, self.prepared.plan))  # none that failed is done
        finally:
            for what in told:
                self.reporter.note(f"iteration {iteration}: {what}")

    def passed_over(self) -> Iterator[str]:
        """Records that were drawn and cannot be used, each once; after many they are counted only."""
        for fault in self.prepared.prompts.untold():
            self.told += 1
            if self.told <= TOLD:
                yield str(fault)
            if self.told == TOLD:
                yield "further records that are left out are counted only, as data/left_out_* of the metrics"

    def save(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        start = replace(self.start, iteration=iteration, here=self.evaluated.get(iteration))
        self.writer.submit(self.compute(partial(self.take, start, cursor)))

    def compute(self, call: Callable[[], T]) -> T:
        """A call that works with models, where they are worked with."""
        return self.prepared.executor.lanes.do("model", call)

    def evaluate(self, iteration: int) -> Accuracy | None:
        """How the weights do after so many iterations; not done again where it is known."""
        if self.prepared.evaluation is None:
            return None
        if iteration not in self.evaluated:
            accuracy = self.compute(self.prepared.evaluation)
            self.records.metrics(iteration, shown(accuracy))
            self.reporter.evaluation(iteration, shown(accuracy))
            self.evaluated[iteration] = accuracy
        return self.evaluated[iteration]

    def answers(self) -> list[dict[str, str]]:
        """What the model answers, sampled, to the first ten held-out prompts."""
        return self.compute(partial(self.prepared.evaluation.answers, 10)) if self.prepared.evaluation else []


def stage_seconds(outcome: Outcome, plan: Plan) -> dict[str, float]:
    """Seconds by node, of a `repeat` without those of its body."""
    seconds: dict[str, float] = {}
    for span in flat(outcome.spans, plan.within):
        seconds[span.node] = seconds.get(span.node, 0.0) + span.end - span.start
    return seconds


def speed(outcome: Outcome) -> dict[str, float]:
    """Tokens sampled per second of sampling."""
    seconds = sum(span.end - span.start for span in outcome.spans if span.node.endswith(".generate"))
    if not seconds or "tokens" not in outcome.records:
        return {}
    lengths = outcome.records["tokens"].data["tokens"].lengths
    assert lengths is not None
    return {"response/tokens_per_second": float(lengths.sum()) / seconds}
