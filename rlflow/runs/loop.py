"""The loop over iterations: take prompts, run the plan, record, evaluate, say how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.data.prompts import Prompts
from rlflow.execution.apply import SkipIteration
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor, Outcome
from rlflow.plan import Plan
from rlflow.runs.bounds import Totals
from rlflow.runs.directory import Records, sample_rows
from rlflow.runs.evaluate import Accuracy, Evaluation, shown
from rlflow.runs.health import health

SAMPLES = 4  # rows of each iteration that are written to samples.jsonl
Say = Callable[[str], None]


@dataclass
class Prepared:
    """Everything that a run needs, made before its first iteration."""

    plan: Plan
    engine: Engine
    executor: Executor
    prompts: Prompts
    per_iteration: int
    iterations: int
    evaluation: Evaluation | None
    eval_every: int
    settings: Mapping[str, Any]
    close: Callable[[], None]


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
        }


def train(prepared: Prepared, folder: Path, say: Say) -> Result:
    """Run all iterations. The run's files are closed whatever happens."""
    records = Records(folder)
    start = time.monotonic()
    try:
        records.settings(prepared.settings, prepared.plan.graph)
        loop = _Loop(prepared, records, say)
        before, first = loop.evaluate(0), answers(prepared)
        loop.run()
        after, last = loop.evaluate(prepared.iterations), answers(prepared)
        save(prepared, folder)
        compared = [one | {"before": one.pop("completion"), "after": other["completion"]} for one, other in zip(first, last, strict=True)]
        records.answers(compared)
        seconds = time.monotonic() - start
        return Result(folder, prepared.iterations, seconds, before, after, loop.totals, compared, loop.last, loop.skipped)
    finally:
        records.close()


def answers(prepared: Prepared) -> list[dict[str, str]]:
    """What the model answers, sampled, to the first ten held-out prompts."""
    return prepared.evaluation.answers(10) if prepared.evaluation else []


def save(prepared: Prepared, folder: Path) -> None:
    """A plain Hugging Face folder for each trained role: ``final/ROLE``."""
    for use in prepared.plan.graph.roles:
        trainer = prepared.engine.models[use.name].trainer if use.trained else None
        if trainer is not None:
            trainer.save(folder / "final" / use.name)


class _Loop:
    def __init__(self, prepared: Prepared, records: Records, say: Say) -> None:
        self.prepared, self.records, self.say = prepared, records, say
        self.totals = Totals()
        self.last: dict[str, float] = {}
        self.skipped = 0
        self._said = 0.0

    def run(self) -> None:
        engine = self.prepared.engine
        for iteration in range(self.prepared.iterations):
            engine.iteration = iteration
            self.iterate(iteration)
            every = self.prepared.eval_every
            if every and (iteration + 1) % every == 0 and iteration + 1 < self.prepared.iterations:
                self.evaluate(iteration + 1)

    def iterate(self, iteration: int) -> None:
        start = time.monotonic()
        prompts = self.prepared.prompts.take(self.prepared.per_iteration)
        try:
            outcome = self.prepared.executor.run(self.prepared.plan, prompts)
        except SkipIteration as skip:
            self.skipped += 1
            self.say(f"iteration {iteration + 1}: skipped, {skip}")
            return
        seconds = time.monotonic() - start
        self.prepared.engine.state |= outcome.state
        self.totals.add(outcome.spans, seconds)
        self.last = outcome.metrics | health(outcome.records) | speed(outcome) | outcome.state | {"seconds": seconds}
        self.records.metrics(iteration, self.last)
        self.records.samples(iteration, sample_rows(outcome.records, SAMPLES))
        self.records.timeline(iteration, outcome)
        self._progress(iteration)

    def _progress(self, iteration: int) -> None:
        """A line every few seconds, and for the first and the last iteration."""
        now = time.monotonic()
        if iteration == 0 or iteration + 1 == self.prepared.iterations or now - self._said >= 3.0:
            self._said = now
            self.say(f"{iteration + 1:>5}/{self.prepared.iterations}  {progress(self.last)}")

    def evaluate(self, iteration: int) -> Accuracy | None:
        if self.prepared.evaluation is None:
            return None
        accuracy = self.prepared.evaluation()
        self.records.metrics(iteration, shown(accuracy))
        count = len(self.prepared.evaluation.prompts)
        self.say(f"held-out accuracy after {iteration} iterations: sampled {accuracy.sampled:.1%}, greedy {accuracy.greedy:.1%} of {count}")
        return accuracy


def speed(outcome: Outcome) -> dict[str, float]:
    """Tokens sampled per second of sampling."""
    seconds = sum(span.end - span.start for span in outcome.spans if span.node.endswith(".generate"))
    if not seconds or "tokens" not in outcome.records:
        return {}
    lengths = outcome.records["tokens"].data["tokens"].lengths
    assert lengths is not None
    return {"response/tokens_per_second": float(lengths.sum()) / seconds}


def progress(metrics: Mapping[str, float]) -> str:
    """The numbers worth a look, in one line."""
    names = [name for name in metrics if name.endswith(("/mean", "/loss", "/kept")) or name in ("response/length", "response/truncated")]
    return "  ".join(f"{name} {metrics[name]:.3g}" for name in names) + f"  {metrics['seconds']:.2f} s"
