"""The loop over iterations: take prompts, run the plan, record, evaluate, save and report.

If an error ends the run, the loop also works out which state can still be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rlflow.author.figures import SECONDS, SPEED, Figure, Of
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer
from rlflow.compiler.graph.model import Graph, Op, all_nodes
from rlflow.compiler.plan import Plan
from rlflow.compiler.spans import flat
from rlflow.errors import PlanError, RemoteError, SkipIteration, Stopped
from rlflow.execution.account import RowAccount
from rlflow.execution.engine import Engine, FlowState
from rlflow.execution.iteration_outcome import Outcome
from rlflow.execution.memory.saved import on_engine
from rlflow.monitoring.reporter import Reporter
from rlflow.runs.bounds import RunTotals
from rlflow.runs.context import LoopTotals, RunContext, RunResult, RunStart
from rlflow.runs.evaluate import Accuracy, shown, unvoted
from rlflow.runs.guards import (
    Guard,
    loss_warnings,
    mismatch_warnings,
    short_repeat_warnings,
    weight_check_warnings,
)
from rlflow.runs.outcomes import funnel_metrics, outcome_metrics, without_funnel
from rlflow.runs.records import Records
from rlflow.runs.recovery import DriverState, Recovery
from rlflow.runs.state import KeptState, MemoryCopy, copied


@dataclass(frozen=True)
class Between:
    """A run's state before an iteration, without the weights, which are still in the models."""

    iteration: int
    cursor: Mapping[str, Any]  # position in the prompts
    flow_state: FlowState  # what the flow carries over between iterations
    versions: Mapping[str, int]  # role → how many updates its weights have had

    @staticmethod
    def of(engine: Engine, iteration: int, cursor: Mapping[str, Any]) -> Between:
        """Return the engine's state before ``iteration``, which hasn't started yet."""
        return Between(
            iteration,
            cursor,
            engine.flow_state,
            {role: model.version for role, model in engine.models.items()},
        )

    def put_back(self, engine: Engine) -> None:
        """Restore what the flow carries over and the version numbers of the weights, but not the weights.

        This is needed even if no weights changed: flows set scalars, and an update raises the version number
        even if it takes no step.
        """
        engine.flow_state = self.flow_state
        for role, version in self.versions.items():
            engine.models[role].version = version


def took_steps(figures: Mapping[Figure, float]) -> bool:
    """Return whether an iteration's updates changed any weights.

    An update that doesn't report its steps is assumed to have changed them.
    """
    steps = [value for figure, value in figures.items() if figure.of is Of.UPDATE and figure.name == "steps"]
    return not steps or any(steps)


UNSAVED = 3  # the run ends after this many checkpoints in a row could not be saved
REPORTED = 20  # number of skipped records that are reported one by one


T = TypeVar("T")


@dataclass(frozen=True)
class LoopState:
    """The loop's own state before an iteration, for recovery."""

    cursor: Mapping[str, Any]  # position in the prompts
    flow_state: FlowState  # what the flow carries over between iterations
    totals: LoopTotals


TakeSnapshot = Callable[[RunStart, Mapping[str, Any], KeptState | None], Snapshot]


class Loop:
    """The iterations of one run, until it ends or is asked to stop."""

    def __init__(
        self,
        context: RunContext,
        records: Records,
        writer: Writer,
        reporter: Reporter,
        take: TakeSnapshot,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a loop.

        ``take``: takes the snapshot for a checkpoint. ``look``: called between iterations; raises Lost if the
        run's folder is gone.
        """
        self.context = context
        self.records = records
        self.writer = writer
        self.reporter = reporter
        self.take = take
        self.look = look
        self.options = context.options
        self.guard = Guard(context.options, context.reasons)
        self.totals = RunTotals(context.executor.queues.room, context.options.staleness, context.plan.within)
        self.start = RunStart()
        self.last: dict[str, float] = {}
        self.skipped = self.reported = 0
        self.evaluated: dict[int, Accuracy] = {}
        self.done = 0  # number of finished iterations, when the folder was last checked
        # the newest state between two iterations that the models still have
        self.between: Between | None = None
        self.lost = ""  # why the newest complete iteration cannot be saved after an error
        self.taken = 0  # iteration of the newest checkpoint; at first, of the start
        # with --commit-every, the in-memory checkpoint of a run in one process
        self.copy: MemoryCopy | None = None
        self.recovery = Recovery(
            context.workers,
            self.options.copies_every,
            DriverState(self.capture, self.rewind, self.replay),
            reporter.note,
        )

    def run(self, start: RunStart) -> RunResult:
        """Run all iterations from ``start`` on, and return the result.

        Raises Stopped if asked to stop, as well as StageError and RemoteError.
        """
        began = time.monotonic()
        self.start, self.taken = start, start.iteration
        if start.here:
            self.evaluated[start.iteration] = start.here
        after, compared = self.recovery.run(self.to_the_end, start.iteration)
        seconds = time.monotonic() - began
        return RunResult(
            self.records.folder,
            self.options.iterations,
            seconds,
            self.start.before,
            after,
            self.totals,
            compared,
            self.last,
            self.skipped,
            self.context.unmeasured,
        )

    def to_the_end(self, first: int) -> tuple[Accuracy | None, list[dict[str, str]]]:
        """Run all iterations from ``first`` on.

        After a worker has died, ``first`` is where recovery restarts. Returns the final accuracy, and
        held-out prompts with the answers before and after training.
        """
        start = self.start
        self.start = replace(
            start, before=start.before or self.evaluate(first), answers=start.answers or self.answers()
        )
        for iteration in range(first, self.options.iterations):
            self.step(iteration)
        self.between = Between.of(
            self.context.engine, max(first, self.options.iterations), self.context.prompts.state()
        )
        after = self.evaluate(self.options.iterations)
        last = self.answers()
        self.done = self.options.iterations
        self.look()
        if first < self.options.iterations:  # otherwise this checkpoint exists already
            self.save(self.options.iterations, self.context.prompts.state())
        pairs = zip(self.start.answers, last, strict=True)
        compared = [one | {"before": one["completion"], "after": other["completion"]} for one, other in pairs]
        self.records.answers(compared)
        return after, compared

    def capture(self) -> LoopState:
        """Return a copy of the loop's own state, for recovery."""
        totals = LoopTotals(deepcopy(self.totals), self.last, self.skipped, self.guard.bad)
        return LoopState(self.context.prompts.state(), self.context.engine.flow_state, totals)

    def rewind(self, state: LoopState) -> None:
        """Go back to the cursor over the data, and to what the flow carries over, in ``state``.

        Rows that were sampled ahead are restored from both.
        """
        self.context.prompts.load(state.cursor)
        self.context.engine.flow_state = state.flow_state

    def replay(self, iteration: int, state: LoopState) -> None:
        """Prepare to repeat an iteration and all later ones.

        ``state``: the loop's state before that iteration.
        """
        engine, flow_state = self.context.engine, state.flow_state
        engine.flow_state = replace(flow_state, memory=on_engine(flow_state.memory, engine))
        counts = state.totals
        self.totals, self.last, self.skipped, self.guard.bad = (
            deepcopy(counts.totals),
            counts.last,
            counts.skipped,
            counts.bad,
        )
        self.evaluated = {
            number: accuracy for number, accuracy in self.evaluated.items() if number <= iteration
        }
        self.records.back_to(iteration)

    def step(self, iteration: int) -> None:
        """Run one iteration, followed by the evaluation and the checkpoint if they are due."""
        cursor, self.context.engine.iteration = self.context.prompts.state(), iteration
        self.between = Between.of(self.context.engine, iteration, cursor)
        self._end_if_lost(iteration, cursor)
        self._end_if_unsaved(iteration)
        self.recovery.commit(iteration)
        self._copy(iteration, cursor)
        self.done = iteration
        self.look()
        try:
            if self.context.executor.stopping:
                raise Stopped
            self.iterate(iteration)
        except Stopped:
            self.save(iteration, cursor)
            raise
        done, options = iteration + 1, self.options
        if options.eval_every and done % options.eval_every == 0 and done < options.iterations:
            self.evaluate(done)
        if options.save_every and done % options.save_every == 0 and done < options.iterations:
            self.save(done, self.context.prompts.state())

    def _copy(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        """Make an in-memory checkpoint before this iteration if one is due. Only for runs in one process."""
        every = self.options.copies_every
        if self.context.workers is None and every and iteration % every == 0:
            self.copy = self.compute(partial(copied, self.context, iteration, cursor))

    def _end_if_lost(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        """Save the run and raise RemoteError if pools can't be restarted any more but all workers still
        respond.
        """
        lost = self.context.workers.lost() if self.context.workers else None
        if lost is not None:
            self.save(iteration, cursor)
            raise RemoteError(lost)

    def _end_if_unsaved(self, iteration: int) -> None:
        """If several checkpoints in a row couldn't be saved, raise PlanError before more work is lost."""
        if self.writer.in_a_row >= UNSAVED:
            why = (
                f"the run ends before iteration {iteration}: {UNSAVED} checkpoints in a row could not "
                "be saved"
            )
            raise PlanError.of(
                "run-unsaved",
                why,
                found=self.writer.missed,
                expected=f"space for checkpoints in {self.records.folder}",
                remedy="free space there, or lower --keep",
            )

    def outcome(self, iteration: int) -> Outcome:
        """Run the plan on the next prompts, or on rows sampled ahead of training."""
        context = self.context
        if context.ahead is None:
            cursor = context.prompts.state()
            outcome = context.executor.run(context.plan, context.engine.take(self.options.prompts))
            outcome.metrics |= context.prompts.left_out(cursor)
            return outcome
        try:
            sampled = context.ahead.advance(iteration)
            outcome = context.executor.run(context.plan, sampled.prompts, sampled)
        except SkipIteration:
            context.ahead.done(iteration)
            raise
        context.ahead.done(iteration)
        return outcome

    def iterate(self, iteration: int) -> None:
        """Run the plan once, then record and report the iteration.

        Raises StageError if the run has to stop.
        """
        checked = (
            self.compute(partial(self.context.weight_check, iteration)) if self.context.weight_check else {}
        )
        start = time.monotonic()
        self.context.executor.wrote = False  # drawing prompts may fail before the plan runs
        try:
            outcome = self.outcome(iteration)
        except SkipIteration as skip:
            self.skipped += 1
            self.records.account(iteration, skip.account if isinstance(skip.account, RowAccount) else None)
            self.reporter.note(f"skipped iteration {iteration}: {skip}")
            return
        except BaseException:
            self.between = None if self.context.executor.wrote else self.between
            raise
        seconds = time.monotonic() - start
        self.context.engine.keep(outcome.state, outcome.memory)
        if took_steps(outcome.metrics):
            self.between = Between.of(self.context.engine, iteration + 1, self.context.prompts.state())
        self.totals.add(outcome.spans, start, seconds)
        if moved := self.context.engine.moved():
            self.records.weights(moved)
        self._record(iteration, outcome, checked, seconds)

    def _record(
        self, iteration: int, outcome: Outcome, checked: Mapping[Figure, float], seconds: float
    ) -> None:
        """Record and report an iteration that took ``seconds``.

        ``checked``: the metrics of the weight check before the iteration. Raises StageError if the run has to
        stop.
        """
        figures = self._figures(outcome, checked, seconds)
        samples = [
            {"role": outcome.sampler, **row} if outcome.sampler else row for row in outcome.summary.rows
        ]
        self.last = self.records.metrics(iteration, figures)
        self.records.account(iteration, outcome.account)
        self.records.samples(iteration, samples)
        self.records.timeline(iteration, outcome)
        self.records.traffic(iteration, self.context.engine.traffic())
        warnings = [
            *short_repeat_warnings(self.context.plan, figures),
            *mismatch_warnings(self.options, figures, outcome.sampler),
            *weight_check_warnings(checked, self.options.max_mismatch, self.options.dtype),
            *self.passed_over(),
            *loss_warnings(figures),
            *self.guard.merge_warnings(figures),
            *self.guard.missing_warnings(figures),
        ]
        try:
            self.guard.check(iteration, figures, outcome.summary)
            # only after the check: a failed iteration is not reported as done
            self.reporter.iteration(iteration, figures, samples, stage_seconds(outcome, self.context.plan))
        finally:
            for warning in warnings:
                self.reporter.note(f"iteration {iteration}: {warning}")

    def _figures(
        self, outcome: Outcome, checked: Mapping[Figure, float], seconds: float
    ) -> dict[Figure, float]:
        """Return all metrics of an iteration that took ``seconds``.

        ``checked``: the metrics of the weight check before the iteration.
        """
        health, graph = outcome.summary.health, self.context.plan.graph
        return {
            **without_funnel(health),
            **outcome_metrics(outcome.account),
            **checked,
            **speed(outcome, graph),
            SECONDS: seconds,
            **funnel_metrics(outcome.account, graph, health, outcome.policies),
            **outcome.metrics,
            **{Figure(Of.STATE, name): value for name, value in outcome.state.items()},
        }

    def passed_over(self) -> Iterator[str]:
        """Yield a warning for each record that was drawn but can't be used, and if too few were drawn.

        After REPORTED warnings, records are only counted.
        """
        if short := self.context.prompts.short():
            yield short
        for fault in self.context.prompts.untold():
            self.reported += 1
            if self.reported <= REPORTED:
                yield str(fault)
            if self.reported == REPORTED:
                yield "further skipped records are only counted, in the metrics data/left_out_*"

    def save(self, iteration: int, cursor: Mapping[str, Any]) -> None:
        """Take a snapshot before an iteration, and queue it for the thread that writes checkpoints.

        ``cursor``: position in the data before this iteration's prompts.
        """
        self._save(iteration, cursor, None)

    def _save(self, iteration: int, cursor: Mapping[str, Any], kept: KeptState | None) -> None:
        """Take and queue a snapshot. ``kept``: the state before the iteration, if the models have moved on."""
        start = replace(self.start, iteration=iteration, here=self.evaluated.get(iteration))
        self.writer.submit(self.compute(partial(self.take, start, cursor, kept)))
        self.taken = iteration

    def rescue(self, again: bool = False) -> None:
        """Save the newest complete iteration of a run that fails, unless it is already saved.

        The state comes from the models or, if workers died or the models are in the middle of an iteration,
        from the in-memory checkpoint. If nothing can be saved, ``lost`` says why. Nothing is raised, because
        the error that ends the run matters more. ``again``: save the iteration even if it has a checkpoint.
        """
        taken = -1 if again else self.taken
        try:
            copy, between = self._newest_copy(), self.between
            if copy is not None and copy.iteration <= taken:
                copy = None
            newest = copy.iteration if copy else max(taken, 0)
            if between is not None and between.iteration > newest and self._saved(between, copy is not None):
                return
            if copy is not None:
                self._save(copy.iteration, copy.cursor, copy.kept)
            elif between is None and self.context.engine.iteration > taken:
                self.lost = (
                    f"iteration {self.context.engine.iteration} failed while it changed weights, so the "
                    "weights belong to no complete iteration (--save-every 1 saves each iteration, "
                    "--commit-every 1 keeps a copy of each in memory)"
                )
        except Exception as error:
            self.lost = f"the last complete iteration cannot be saved: {type(error).__name__}: {error}"

    def _saved(self, between: Between, copied: bool) -> bool:
        """Save the state that the models still have, and return True.

        If workers have died, return False as long as there is an in-memory checkpoint (``copied``), or else
        raise RemoteError.
        """
        between.put_back(self.context.engine)
        try:
            self.save(between.iteration, between.cursor)
        except RemoteError:
            if not copied:
                raise
            return False
        return True

    def _newest_copy(self) -> MemoryCopy | None:
        """Return the newest in-memory checkpoint of the pools or of this process, or None if there is none."""
        point = self.recovery.newest()
        if point is None or self.context.workers is None:
            return self.copy
        states, commit = self.context.workers.copied(point.commit), point.commit
        kept = KeptState(states, commit.versions, point.driver.flow_state, commit.queue)
        return MemoryCopy(point.iteration, point.driver.cursor, kept)

    def compute(self, call: Callable[[], T]) -> T:
        """Make a call in the thread that runs the models, and return its result."""
        return self.context.executor.queues.do("model", call)

    def evaluate(self, iteration: int) -> Accuracy | None:
        """Return the accuracy after ``iteration`` iterations, or None if the run has no evaluation.

        It is measured only once per iteration.
        """
        if self.context.evaluation is None:
            return None
        if iteration not in self.evaluated:
            with self.records.evaluation(iteration) as keep:
                accuracy = self.context.evaluation(keep)
            for line in unvoted(accuracy) if not self.evaluated else ():
                self.reporter.note(line)
            self.records.metrics(iteration, shown(accuracy))
            self.records.traffic(
                iteration,
                {f"evaluation/{kind}": size for kind, size in self.context.engine.traffic().items()},
            )
            self.reporter.evaluation(iteration, shown(accuracy))
            self.evaluated[iteration] = accuracy
        return self.evaluated[iteration]

    def answers(self) -> list[dict[str, str]]:
        """Return the model's sampled answers to the first ten held-out prompts, or [] without an evaluation."""
        return self.context.evaluation.answers(10) if self.context.evaluation else []


def stage_seconds(outcome: Outcome, plan: Plan) -> dict[str, float]:
    """Return how many seconds each node took. A `repeat` doesn't include the nodes in its body."""
    seconds: dict[str, float] = {}
    for span in flat(outcome.spans, plan.within):
        seconds[span.node] = seconds.get(span.node, 0.0) + span.end - span.start
    return seconds


def speed(outcome: Outcome, graph: Graph) -> dict[Figure, float]:
    """Return how many tokens per second were sampled, as a metric over all nodes that sample.

    Returns {} if nothing was sampled.
    """
    nodes = {node.name for node in all_nodes(graph.nodes) if node.op is Op.GENERATE}
    seconds = sum(span.end - span.start for span in outcome.spans if span.node in nodes)
    tokens = sum(count.tokens for source, count in outcome.account.sampled.items() if source in nodes)
    return {SPEED: tokens / seconds} if seconds and tokens else {}
