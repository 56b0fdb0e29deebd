"""The loop over iterations: take prompts, run the plan, record, evaluate, save, tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer
from rlflow.data.prompts import Prompts
from rlflow.execution.ahead import Ahead
from rlflow.execution.apply import SkipIteration, Stopped
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor, Outcome
from rlflow.given.options import Options
from rlflow.plan import Plan
from rlflow.runs.bad_days import Guard
from rlflow.runs.bounds import Totals
from rlflow.runs.directory import Records
from rlflow.runs.evaluate import Accuracy, Evaluation, shown
from rlflow.watch.reporter import Reporter


@dataclass
class Prepared:
    """Everything that a run needs, made before its first iteration. ``folders``: the model folder of each role that has one."""

    plan: Plan
    engine: Engine
    executor: Executor
    prompts: Prompts
    options: Options
    evaluation: Evaluation | None
    settings: Mapping[str, Any]
    folders: Mapping[str, Path]
    reasons: Callable[[], Mapping[str, str]]
    close: Callable[[], None]
    ahead: Ahead | None = None


@dataclass(frozen=True)
class Start:
    """Where a run begins: at its first iteration, or where a checkpoint was taken. ``before`` and ``answers``: how the first weights
    did, known where the run was begun earlier."""

    iteration: int = 0
    before: Accuracy | None = None
    answers: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Result:
    """What a run came to. ``before`` and ``after`` are None where there was nothing to evaluate."""

    folder: Path
    iterations: int
    seconds: float
    before: Accuracy | None
    after: Accuracy | None
    totals: Totals
    answers: list[dict[str, str]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

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


TakeSnapshot = Callable[[Start, Mapping[str, Any]], Snapshot]


class Loop:
    """One run, from its start to its end or to the request to stop. Raises Stopped after saving where it was stopped."""

    def __init__(self, prepared: Prepared, records: Records, writer: Writer, reporter: Reporter, take: TakeSnapshot) -> None:
        self.prepared, self.records, self.writer, self.reporter, self.take = prepared, records, writer, reporter, take
        self.options = prepared.options
        self.guard = Guard(prepared.options, prepared.reasons)
        self.totals = Totals(prepared.executor.lanes.room, prepared.options.staleness)
        self.start = Start()
        self.last: dict[str, float] = {}
        self.skipped = 0

    def run(self, start: Start) -> Result:
        began = time.monotonic()
        self.start = replace(start, before=start.before or self.evaluate(start.iteration), answers=start.answers or self.answers())
        for iteration in range(start.iteration, self.options.iterations):
            self.step(iteration)
        after = self.evaluate(self.options.iterations)
        last = self.answers()
        self.save(self.options.iterations, self.prepared.prompts.state())
        pairs = zip(self.start.answers, last, strict=True)
        compared = [one | {"before": one["completion"], "after": other["completion"]} for one, other in pairs]
        self.records.answers(compared)
        seconds = time.monotonic() - began
        return Result(self.records.folder, self.options.iterations, seconds, self.start.before, after, self.totals, compared, self.last,
                      self.skipped)

    def step(self, iteration: int) -> None:
        """One iteration, the evaluation that is due after it, and the checkpoint that is due after both."""
        cursor = self.prepared.prompts.state()
        self.prepared.engine.iteration = iteration
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

    def outcome(self, iteration: int) -> Outcome:
        prepared = self.prepared
        if prepared.ahead is None:
            return prepared.executor.run(prepared.plan, prepared.prompts.take(self.options.prompts))
        try:
            sampled = prepared.ahead.advance(iteration)
            return prepared.executor.run(prepared.plan, sampled.prompts, sampled)
        finally:
            if not prepared.executor.stopping:
                prepared.ahead.done(iteration)

    def iterate(self, iteration: int) -> None:
        start = time.monotonic()
        try:
            outcome = self.outcome(iteration)
        except SkipIteration as skip:
            self.skipped += 1
            self.reporter.note(f"iteration {iteration + 1} is skipped: {skip}")
            return
        seconds = time.monotonic() - start
        self.prepared.engine.state |= outcome.state
        self.totals.add(outcome.spans, start, seconds)
        self.last = outcome.metrics | outcome.summary.health | speed(outcome) | outcome.state | {"seconds": seconds}
        samples = outcome.summary.rows
        self.records.metrics(iteration, self.last)
        self.records.samples(iteration, samples)
        self.records.timeline(iteration, outcome)
        self.reporter.iteration(iteration, self.last, samples, stage_seconds(outcome))
        self.guard.check(iteration, self.last, outcome.summary)

    def save(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        self.writer.submit(self.take(replace(self.start, iteration=iteration), cursor))

    def evaluate(self, iteration: int) -> Accuracy | None:
        if self.prepared.evaluation is None:
            return None
        accuracy = self.prepared.evaluation()
        self.records.metrics(iteration, shown(accuracy))
        self.reporter.evaluation(iteration, shown(accuracy))
        return accuracy

    def answers(self) -> list[dict[str, str]]:
        """What the model answers, sampled, to the first ten held-out prompts."""
        return self.prepared.evaluation.answers(10) if self.prepared.evaluation else []


def stage_seconds(outcome: Outcome) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for span in outcome.spans:
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
