"""The executor of a plan: runs nodes in queues, and stores each column until no node needs it any more."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, spread
from rlflow.author.columns import Kind, Level
from rlflow.compiler.graph.model import Column, Node, Op
from rlflow.compiler.plan import Plan
from rlflow.compiler.scheduler import Finish, Free, Instruction, Scheduler, StartNode
from rlflow.compiler.spans import Span
from rlflow.errors import SkipIteration, StageError, Stopped
from rlflow.execution.account import REPLACED
from rlflow.execution.apply import failing, shapes
from rlflow.execution.engine import Engine
from rlflow.execution.iteration_outcome import Outcome, Sampled, sampler_of_records
from rlflow.execution.node_calls import PERFORM
from rlflow.execution.pieces import Pieces
from rlflow.execution.queues import Queues
from rlflow.execution.row_figures import ScoredRecords
from rlflow.execution.row_ledger import Ledger
from rlflow.execution.store import Store
from rlflow.execution.summary import IterationSummary
from rlflow.processes.deadline import LOOK, Deadline
from rlflow.processes.watchdog.heartbeat_page import HeartbeatPage
from rlflow.processes.watchdog.process_tag import here_alone


class Executor:
    """Runs plans, one iteration at a time. The column store is empty after each iteration, even a failed one.

    ``heartbeat_page``: shows the watchdog process which nodes are running. ``clock``: the clock for node
    deadlines, in seconds. ``away``: how long this clock may pause, in seconds. The watchdog doesn't see these
    pauses.
    """

    def __init__(
        self, engine: Engine, queues: Queues, clock: Callable[[], float] = time.monotonic, away: float = 0.0
    ) -> None:
        self.engine, self.clock, self.away = engine, clock, away
        self.queues = queues
        self.store = Store()
        self.stopping = False
        self.wrote = False  # whether the last iteration changed weights or began to
        self.heartbeat_page = HeartbeatPage()

    def run(self, plan: Plan, prompts: Batch, sampled: Sampled | None = None) -> Outcome:
        """Run one iteration, in which only some calls may be due, and return its outcome.

        ``sampled``: rows that were sampled ahead of training. Raises StageError if a stage raises an
        exception or misses its deadline. If ``stopping`` is set before any weights change, no more nodes
        start, and Stopped is raised once the running ones have ended. After weights have started to change,
        the iteration runs to its end.
        """
        outcome = (
            Outcome(dict(sampled.metrics), list(sampled.spans), account=deepcopy(sampled.account))
            if sampled
            else Outcome()
        )
        run = PlanRun(
            self,
            plan.at(self.engine.iteration),
            prompts,
            outcome,
            self.engine.state_batch(prompts).data,
            sampled.rows if sampled else {},
        )
        self.store, self.wrote = run.store, False
        try:
            self._finished(run, outcome)
            outcome.summary = self.queues.do("model", partial(self._summary, outcome))
            outcome.ranks = self.engine.ran()
        finally:
            self.wrote = run.writing
            # after a stop, rows that were sampled ahead for the unfinished iteration must still be saved
            if not self.stopping:
                self.engine.finished()
        return outcome

    def _summary(self, outcome: Outcome) -> IterationSummary:
        """Return the summary of the recorded columns.

        If several trained roles sample, it has separate health metrics for each.
        """
        whole = self.engine.summarise(outcome.records, outcome.judged.get("", ScoredRecords()))
        own = {
            role: self.engine.summarise(records, outcome.judged.get(role, ScoredRecords())).health
            for role, records in outcome.policies.items()
        }
        named = {
            figure._replace(role=role): value
            for role, health in own.items()
            for figure, value in health.items()
        }
        return replace(whole, health=named) if named else whole

    def _finished(self, run: PlanRun, outcome: Outcome) -> None:
        """Run the plan to its end. A SkipIteration that ends it gets the row account attached."""
        try:
            run.until_finished()
        except SkipIteration as skip:
            outcome.account.add(run.ledger.account())
            skip.account = outcome.account
            raise

    def run_ahead(
        self,
        plan: Plan,
        prompts: Batch,
        outcome: Outcome,
        state: Mapping[str, Data],
        ready: Mapping[int, Batch],
        wanted: Collection[int],
    ) -> dict[int, Batch]:
        """Run part of a plan, and return the outputs of the nodes ``wanted`` by node id.

        ``ready``: rows that are already known, by node id. Raises SkipIteration if there is nothing to train
        on.
        """
        run = PlanRun(self, plan, prompts, outcome, state, ready, wanted=wanted)
        try:
            run.until_finished()
        except SkipIteration:
            outcome.account.add(run.ledger.account())
            raise
        return run.outputs

    def evaluating(self) -> Executor:
        """Return an executor for an evaluation, which uses the same queues.

        A stop request doesn't interrupt an evaluation: the run saves the trained state afterwards.
        """
        other = Executor(self.engine.evaluating(), self.queues, self.clock, self.away)
        other.heartbeat_page = self.heartbeat_page
        return other

    def run_body(self, plan: Plan, prompts: Batch, outcome: Outcome, state: Mapping[str, Data]) -> Batch:
        """Run the body of a `repeat` once and return its results."""
        run = PlanRun(self, plan, prompts, outcome, state, body=True)
        run.until_finished()
        assert run.results is not None
        return run.results


class PlanRun:
    """One run of a plan: either a main plan, or the body of a `repeat`, which runs in its own thread.

    ``ready``: rows that are already known, by node id. ``wanted``: ids of the nodes whose outputs to keep; if
    empty, the plan's records are kept instead.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        prompts: Batch,
        outcome: Outcome,
        state: Mapping[str, Data],
        ready: Mapping[int, Batch] = MappingProxyType({}),
        body: bool = False,
        wanted: Collection[int] = (),
    ) -> None:
        self.executor = executor
        self.plan = plan
        self.prompts = prompts
        self.outcome = outcome
        self.state = state
        self.ready, self.body, self.wanted = ready, body, wanted
        self.outputs: dict[int, Batch] = {}
        self.engine = executor.engine
        self.store = Store()
        self.ledger = Ledger(plan.graph, self.store.axes, executor.engine.asking.longest, plan.idle)
        self.results: Batch | None = None
        self._scheduler = Scheduler(plan, executor.queues.room)
        self._ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._deadlines: dict[int, Deadline] = {}
        self._since: dict[int, float] = {}
        self.pieces = Pieces(plan)
        # axis in the graph → its rows without those drawn from buffers, once columns of it were recorded
        self._recorded_axes: dict[int, Axis] = {}
        self._failure: BaseException | None = None
        self.writing = False

    def until_finished(self) -> None:
        """Run the plan to its end. If nodes fail, raise the first error."""
        instructions = self._scheduler.begin()
        try:
            while not self._carry_out(instructions):
                unit, error = self._next()
                if error is not None and self._failure is None:
                    self._failure = error
                if self.executor.stopping and not self.writing and self._failure is None:
                    self._failure = Stopped()
                    self._scheduler.halt()
                instructions = self._report(unit, error)
        finally:
            self.store.close()
        if self._failure is not None:
            raise self._failure

    def _report(self, unit: int, error: BaseException | None) -> list[Instruction]:
        if unit in self.plan.source_of:
            return self._scheduler.released(unit)
        return self._scheduler.failed(unit) if error else self._scheduler.done(unit)

    def _carry_out(self, instructions: list[Instruction]) -> bool:
        """Carry out the scheduler's instructions. Return True if the run has ended."""
        over = any(isinstance(instruction, Finish) for instruction in instructions)
        if over and self._failure is None:
            self._record()
        for instruction in instructions:
            if isinstance(instruction, StartNode):
                self._start(instruction.node)
            elif isinstance(instruction, Free):
                self.store.free(instruction.columns)
        return over

    def _start(self, unit: int) -> None:
        node = self.plan.node(unit)
        self._deadlines.pop(unit, None)
        self.writing |= bool(node.writes)
        if self._instant(unit):
            self._job(unit)()
        else:
            self.executor.queues.submit(self.plan.lane[unit], self._job(unit))

    def _instant(self, unit: int) -> bool:
        """True if a unit needs no queue, because its columns exist already or it only joins pieces."""
        return (
            self.plan.node(unit).op in (Op.DATA, Op.STATE)
            or unit in self.ready
            or unit in self.plan.in_pieces
        )

    def _job(self, unit: int) -> Callable[[], None]:
        def job() -> None:
            error: BaseException | None = None
            node, self._since[unit] = self.plan.node(unit), time.monotonic()
            seconds = self.seconds(node, self._rows(unit))
            self._deadlines[unit] = Deadline(seconds + self.engine.grace, self.executor.clock)
            try:
                with (
                    self.executor.heartbeat_page.during(
                        node.name, self.engine.iteration, seconds + self.executor.away
                    ),
                    here_alone(),
                ):
                    self._perform(unit)
            except BaseException as raised:
                error = raised
            if not self._instant(unit):
                self._span(unit)
            self._ended.put((unit, error))

        return job

    def _span(self, unit: int) -> None:
        """Record how long a unit, or its latest chunk, took, as a span that ends now."""
        start, end = self._since[unit], time.monotonic()
        self._since[unit] = end
        self.outcome.spans.append(
            Span(self.plan.node(unit).name, self.plan.lane[unit], start, end, self.plan.names_before(unit))
        )

    def chunk_ended(self, unit: int, released: int) -> None:
        """Let the units that read a chunk start.

        ``unit``: the node that samples the chunk. ``released``: the number of the chunk.
        """
        self._span(unit)
        self._ended.put((released, None))

    def _next(self) -> tuple[int, BaseException | None]:
        """Wait for the next unit to end. Return it with its error, or with None if it succeeded.

        A unit that is still queued has no deadline yet. If no running unit has one, check again every LOOK
        seconds. Raises StageError if a unit misses its deadline.
        """
        while True:
            begun = [i for i in self._scheduler.running if i in self._deadlines]
            try:
                return self._ended.get(timeout=min((self._deadlines[i].wait() for i in begun), default=LOOK))
            except queue.Empty:
                if late := [i for i in begun if self._deadlines[i].left() <= 0]:
                    self.executor.queues.lost(self.plan.lane[late[0]])
                    raise self._late(late[0]) from None

    def _rows(self, unit: int) -> int:
        if unit in self.plan.pieces:
            return len(self.pieces.axis(self.plan.pieces[unit]))
        return len(self.store.axes.get(self.plan.node(unit).axis, ()))

    def seconds(self, node: Node, rows: int = 0) -> float:
        """Return the deadline of a node's call, in seconds.

        For a reward, this is at least the total of the deadlines of its ``rows`` rows.
        """
        return max(node.timeout, self.engine.reward_timeout * rows) if node.op is Op.REWARD else node.timeout

    def _late(self, unit: int) -> StageError:
        node, batch = self.plan.node(unit), self._inputs(unit)
        return StageError(
            node.name,
            self.engine.iteration,
            len(batch),
            f"no result after its deadline of {self.seconds(node, len(batch)):g} s",
            node.place,
            shapes(batch),
        )

    def _inputs(self, unit: int) -> Batch:
        if unit in self.plan.pieces:
            return self.pieces.gather(self.store, self.plan.pieces[unit], self.fetch)
        node = self.plan.graph.nodes[unit]
        if node.op is Op.CONCAT:
            return Batch(self.store.axes[node.axis], {})
        return self.store.gather(self.plan, node, self.fetch)

    def fetch(self, data: Data, axis: Axis) -> Data:
        """Return the column with its values copied into this process."""
        return self.engine.fetch(Batch(axis, {"column": data})).data["column"]

    def _perform(self, unit: int) -> None:
        """Run a node or piece and store its output."""
        node = self.plan.node(unit)
        if unit in self.plan.pieces:
            self._perform_piece(unit, node)
            return
        if node.op is Op.DATA:
            result: Batch | None = self.engine.spread(self.prompts, self.plan.home.get(node.id))
        elif node.op is Op.STATE:
            result = Batch(self.prompts.axis, self.state)
        elif node.id in self.ready:
            result = self.ready[node.id]
        elif unit in self.plan.in_pieces:
            result, metrics = self.pieces.joined(self.engine, node)
            self.outcome.log(node, metrics)
        else:
            batch = self._inputs(unit)
            with failing(node.name, self.engine.iteration, batch, node.place):
                result, metrics = PERFORM[node.op](self, node, batch)
                if result is not None and len(result) != len(
                    self.store.axes.get(node.rows_axis, result.axis)
                ):
                    raise ValueError(
                        f"found {len(result)} rows, expected {len(self.store.axes[node.rows_axis])}"
                    )
            self.outcome.log(node, metrics)
        if result is not None:
            self.store.put(node, result, self.plan.keeps(node))
            self.ledger.sampled(node, result)
            if node.op is Op.REPEAT and REPLACED in result:
                self.ledger.marked[node.id] = self.engine.gather(result.select(REPLACED))[REPLACED]
            if node.op in (Op.GENERATE, Op.REPEAT) and "failed" in result:
                self.ledger.failed[node.id] = self.engine.gather(result.select("failed"))["failed"]

    def _perform_piece(self, unit: int, node: Node) -> None:
        """Run a piece. Chunks without rows are skipped, except the first one, which defines the columns."""
        piece, batch = self.plan.pieces[unit], self._inputs(unit)
        if len(batch) or not piece.chunk:
            with failing(node.name, self.engine.iteration, batch, node.place):
                self.pieces.put(piece, *PERFORM[node.op](self, node, batch))

    def _record(self) -> None:
        """Keep what is needed after the run: recorded columns, a body's results, and the flow's state.

        If there are ``wanted`` nodes, only their outputs are kept.
        """
        if self.wanted:
            self.outputs = {i: self._given(self.plan.graph.nodes[i]) for i in self.wanted}
            return
        graph, columns = self.plan.graph, self.store.columns
        self.outcome.records |= self._recorded(self.plan.records)
        self.outcome.policies = {role: self._recorded(own) for role, own in self.plan.policies.items()}
        self._record_judged()
        self.outcome.sampler = sampler_of_records(graph, self.plan.keep_until_end)
        self.outcome.state = {
            slot.name: self.engine.state[slot.name]  # unchanged, without rounding
            if graph.nodes[slot.final.node].op is Op.STATE
            else float(columns[slot.final].value)
            for slot in graph.state
        }
        self.outcome.account.add(self.ledger.account())
        self.ledger.store(self.outcome.account)
        if graph.results:
            self._take_results()

    def _record_judged(self) -> None:
        """Record the scores of rewards, and the score-based columns that updates read."""
        for role, judged in self.plan.judged.items():
            names = {reward: f"scores of {reward}" for reward in judged.rewards}
            learned = {f"learned {place}": column for place, column in enumerate(judged.learned)}
            records = self.outcome.policies.get(role, self.outcome.records)
            records |= self._recorded(
                {names[reward]: column for reward, column in judged.rewards.items()} | learned
            )
            self.outcome.judged[role] = ScoredRecords(names, tuple(learned))

    def _recorded(self, names: Mapping[str, Column]) -> dict[str, Batch]:
        """Return the columns to keep to the end, each in a batch of its own, under the given names.

        Rows that were drawn from a buffer are left out, because they belong to earlier iterations.
        """
        store, nodes = self.store, self.plan.graph.nodes
        there = {
            name: column
            for name, column in names.items()
            if column in self.plan.keep_until_end and column in store.columns
        }
        return {
            name: self._not_drawn(nodes[column.node].rows_axis, name, store.columns[column])
            for name, column in there.items()
        }

    def _not_drawn(self, number: int, name: str, data: Data) -> Batch:
        """Return a column of an axis as a batch, without rows that were drawn from a buffer.

        ``number``: the axis in the graph.
        """
        axis, index = self.store.axes[number], self.ledger.not_drawn(number)
        if index is None:
            return Batch(axis, {name: data})
        chosen = self._recorded_axes.setdefault(number, axis.take(index))
        return Batch(chosen, {name: data.take(index, axis)})

    def _given(self, node: Node) -> Batch:
        """Return the stored columns of a node as a batch."""
        sources = {output.name: output.source for output in node.outputs}
        data = {sources[name]: self.store.columns[Column(node.id, name)] for name in self.plan.keeps(node)}
        return Batch(self.store.axes[node.rows_axis], data)

    def _take_results(self) -> None:
        graph, batches = self.plan.graph, {}
        inputs = [item for item in graph.results if item.column in self.store.columns]
        if not inputs:
            return
        rows = self.store.axes[graph.rows]
        for item in inputs:
            own = self.store.axes[graph.nodes[item.column.node].rows_axis]
            batches[item.parameter] = spread(
                item.parameter, self.store.columns[item.column], own, rows, self.fetch
            )
        self.results = Batch(rows, batches)
        if (replaced := self.ledger.replaced()) is not None:
            mark = Batch(rows, {REPLACED: Data(Kind(Level.ROW, "bool"), replaced)})
            self.results |= self.engine.spread(mark, self.engine.near(self.results))
