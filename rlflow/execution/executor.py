"""The in-process executor: feeds the scheduler, runs nodes in lanes, holds columns until their last reader is done."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.batch import Axis, Batch, Data, other_axis
from rlflow.columns import Kind, Level
from rlflow.errors import FlowError, StageError
from rlflow.execution.apply import Stopped, failing, shapes
from rlflow.execution.engine import Engine, Metrics, Terms
from rlflow.execution.lanes import Lanes
from rlflow.execution.summary import Summary
from rlflow.execution.tally import Tallies, settled
from rlflow.graph.model import Column, Node, Op
from rlflow.plan import Plan
from rlflow.schedule import Finish, Free, Instruction, Scheduler, Start
from rlflow.spans import RankSpan, Span

QUEUED_SECONDS = 0.05  # how soon a node that waits for its lane is looked at again


@dataclass
class Outcome:
    """What an iteration gave: metrics by ``node/name``, when each node ran and, on pools, each rank, and the columns that the run
    records."""

    metrics: Metrics = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    ranks: list[RankSpan] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    summary: Summary = field(default_factory=Summary)


@dataclass(frozen=True)
class Sampled:
    """What was done ahead for an iteration: its prompts, the rows of the nodes that sample or repeat, and what these have to say.
    ``skipped``: why the iteration has nothing to train on, where it has not."""

    prompts: Batch
    rows: Mapping[int, Batch] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    skipped: str = ""


class Store:
    """Columns of one iteration, and the real row axis of each of the graph's. Nodes put from their threads; once closed it stays
    empty, whatever a late node still brings."""

    def __init__(self) -> None:
        self.columns: dict[Column, Data] = {}
        self.axes: dict[int, Axis] = {}
        self.peak_bytes = 0
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, node: Node, batch: Batch, names: tuple[str, ...]) -> None:
        """Keep the outputs that are read later. ``batch`` has them under the names that the function knows."""
        with self._lock:
            if self._closed:
                return
            self.axes.setdefault(node.rows_axis, batch.axis)
            for output in node.outputs:
                if output.name in names:
                    data = self.columns[Column(node.id, output.name)] = batch.data[output.source]
                    self._bytes += data.nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def free(self, columns: Iterable[Column]) -> None:
        with self._lock:
            gone = [self.columns.pop(column) for column in columns if column in self.columns]
            self._bytes -= sum(data.nbytes for data in gone)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.columns.clear()

    def gather(self, plan: Plan, node: Node) -> Batch:
        """The node's inputs under its parameters' names, spread over its rows."""
        axis = self.axes[node.axis]
        found: dict[str, Data] = {}
        for item in node.inputs:
            data, own = self.columns[item.column], self.axes[plan.graph.nodes[item.column.node].rows_axis]
            found[item.parameter] = _spread(item.parameter, data, own, axis)
        return Batch(axis, found)


def _spread(name: str, data: Data, own: Axis, axis: Axis) -> Data:
    """A column over the rows of ``axis``. Raises FlowError for one whose kind the tracer could not know and that cannot be spread."""
    if own is axis or data.kind.level is Level.SCALAR:
        return data
    index = own.rows_of(axis)
    if index is None or data.kind.level is Level.TOKEN:
        raise FlowError(other_axis([name]))
    return data.take(index, own)


class Executor:
    """Runs plans, one iteration at a time. After each run, failed ones too, the store is empty."""

    def __init__(self, engine: Engine, lanes: Lanes) -> None:
        self.engine = engine
        self.lanes = lanes
        self.store = Store()
        self.stopping = False

    def run(self, plan: Plan, prompts: Batch, sampled: Sampled | None = None) -> Outcome:
        """One iteration; ``sampled``: what of it was done ahead.

        Raises StageError when a stage raised or passed its deadline, and Stopped when ``stopping`` was set in time: nodes that run end,
        no others start. Once weights are being changed the iteration goes on to its end.
        """
        outcome = Outcome(dict(sampled.metrics), list(sampled.spans)) if sampled else Outcome()
        run = _Run(self, plan, prompts, outcome, self.engine.state_batch(prompts).data, sampled.rows if sampled else {})
        self.store = run.store
        try:
            run.until_finished()
            outcome.summary = self.engine.summarise(outcome.records)
            outcome.ranks = self.engine.ran()
        finally:
            if not self.stopping:  # what was done ahead for an iteration that is not done is saved
                self.engine.finished()
        return outcome

    def run_body(self, plan: Plan, prompts: Batch, outcome: Outcome, state: Mapping[str, Data]) -> Batch:
        """The body of a repeat, once; what it returns."""
        run = _Run(self, plan, prompts, outcome, state)
        run.until_finished()
        assert run.results is not None
        return run.results


class _Run:
    """One plan being run: the main plan or, in a thread of its own, the body of a repeat. ``ready``: rows by node that are there."""

    def __init__(
        self, executor: Executor, plan: Plan, prompts: Batch, outcome: Outcome, state: Mapping[str, Data],
        ready: Mapping[int, Batch] = MappingProxyType({}),
    ) -> None:
        self.executor, self.plan, self.prompts, self.outcome, self.state = executor, plan, prompts, outcome, state
        self.ready = ready
        self.engine = executor.engine
        self.store = Store()
        self.results: Batch | None = None
        self._scheduler = Scheduler(plan, executor.lanes.room)
        self._ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._deadlines: dict[int, float] = {}
        self._failure: BaseException | None = None
        self._writing = False

    def until_finished(self) -> None:
        instructions = self._scheduler.begin()
        try:
            while not self._carry_out(instructions):
                node, error = self._next()
                if error is not None and self._failure is None:
                    self._failure = error
                if self.executor.stopping and not self._writing and self._failure is None:
                    self._failure = Stopped()
                    self._scheduler.halt()
                instructions = self._scheduler.failed(node) if error else self._scheduler.done(node)
        finally:
            self.store.close()
        if self._failure is not None:
            raise self._failure

    def _carry_out(self, instructions: list[Instruction]) -> bool:
        """Whether the run is over."""
        over = any(isinstance(instruction, Finish) for instruction in instructions)
        if over and self._failure is None:
            self._record()
        for instruction in instructions:
            if isinstance(instruction, Start):
                self._start(self.plan.graph.nodes[instruction.node])
            elif isinstance(instruction, Free):
                self.store.free(instruction.columns)
        return over

    def _start(self, node: Node) -> None:
        self._deadlines.pop(node.id, None)
        self._writing |= bool(node.writes)
        if self._given(node):
            self._job(node)()
        else:
            self.executor.lanes.submit(self.plan.lane[node.id], self._job(node))

    def _given(self, node: Node) -> bool:
        """Whether nothing is computed for it."""
        return node.op in (Op.DATA, Op.STATE) or node.id in self.ready

    def _job(self, node: Node) -> Callable[[], None]:
        def job() -> None:
            error: BaseException | None = None
            start = time.monotonic()
            self._deadlines[node.id] = start + self._seconds(node) + self.engine.grace
            try:
                self._perform(node)
            except BaseException as raised:
                error = raised
            if not self._given(node):
                waits = tuple(self.plan.graph.nodes[i].name for i in self.plan.waits_for[node.id])
                self.outcome.spans.append(Span(node.name, self.plan.lane[node.id], start, time.monotonic(), waits))
            self._ended.put((node.id, error))

        return job

    def _next(self) -> tuple[int, BaseException | None]:
        """The next node that ends, waiting no longer than the nearest deadline. A node that is still queued for its lane has none:
        a little later it may have one."""
        while True:
            running, now = self._scheduler.running, time.monotonic()
            wait = min(self._deadlines.get(i, now + QUEUED_SECONDS) for i in running) - now
            try:
                return self._ended.get(timeout=min(max(wait, 0.0), 3600.0))
            except queue.Empty:
                late = [i for i in running if self._deadlines.get(i, math.inf) <= time.monotonic()]
                if late:
                    self.executor.lanes.lost(self.plan.lane[late[0]])
                    raise self._late(self.plan.graph.nodes[late[0]]) from None

    def _seconds(self, node: Node) -> float:
        """How long a node may run. A reward has the deadlines of its rows, one after another at worst."""
        if node.op is not Op.REWARD:
            return node.timeout
        return max(node.timeout, self.engine.reward_timeout * len(self.store.axes[node.axis]))

    def _late(self, node: Node) -> StageError:
        batch = self.store.gather(self.plan, node)
        return StageError(node.name, self.engine.iteration, len(batch), f"no result after its deadline of {self._seconds(node):g} s",
                          node.place, shapes(batch))

    def _perform(self, node: Node) -> None:
        """Run one node and keep what it gives."""
        if node.op is Op.DATA:
            result: Batch | None = self.engine.spread(self.prompts, self.plan.home.get(node.id))
        elif node.op is Op.STATE:
            result = Batch(self.prompts.axis, self.state)
        elif node.id in self.ready:
            result = self.ready[node.id]
        else:
            batch = self.store.gather(self.plan, node)
            with failing(node.name, self.engine.iteration, batch, node.place):
                result, metrics = PERFORM[node.op](self, node, batch)
                if result is not None and len(result) != len(self.store.axes.get(node.rows_axis, result.axis)):
                    raise ValueError(f"found {len(result)} rows, expected {len(self.store.axes[node.rows_axis])}")
            self.outcome.metrics |= settled(metrics, f"{node.name}/")
        if result is not None:
            self.store.put(node, result, self.plan.keeps(node))

    def _record(self) -> None:
        """Take what outlives the run: recorded columns, results of a body, the state's last values."""
        graph, columns = self.plan.graph, self.store.columns
        for column in sorted(self.plan.held_to_end, key=lambda c: c.node):
            if column in columns:
                axis = self.store.axes[graph.nodes[column.node].rows_axis]
                self.outcome.records[column.name] = Batch(axis, {column.name: columns[column]})
        self.outcome.state = {slot.name: float(columns[slot.final].value) for slot in graph.state}
        if graph.results:
            self._take_results()

    def _take_results(self) -> None:
        graph, found = self.plan.graph, {}
        kept = [item for item in graph.results if item.column in self.store.columns]
        if not kept:
            return
        rows = self.store.axes[graph.rows]
        for item in kept:
            own = self.store.axes[graph.nodes[item.column.node].rows_axis]
            found[item.parameter] = _spread(item.parameter, self.store.columns[item.column], own, rows)
        self.results = Batch(rows, found)

    # -- node kinds ----------------------------------------------------------------------------------------------------------

    def _terms(self, node: Node, batch: Batch | None = None) -> Terms:
        ahead = batch is not None and len(batch) <= self.plan.ahead.get(node.id, -1)
        return Terms(self.plan.home.get(node.id), self._seconds(node), ahead, node=node.name)

    def _settings(self, node: Node) -> Mapping[str, Any]:
        return self.plan.program.settings[node.name]

    def generate(self, node: Node, batch: Batch) -> tuple[Batch, Tallies]:
        rows = self.engine.generate(node.role or "", batch, self._settings(node), node.call, self._terms(node))
        return rows, {}

    def forward(self, node: Node, batch: Batch) -> tuple[Batch, Tallies]:
        return self.engine.forward(node.role or "", tuple(output.source for output in node.outputs), batch, self._terms(node, batch)), {}

    def reward(self, node: Node, batch: Batch) -> tuple[Batch, Tallies]:
        return self.engine.reward(node.role or "", batch, self._terms(node))

    def update(self, node: Node, batch: Batch) -> tuple[None, Tallies]:
        loss = self.plan.program.functions[node.name]
        assert isinstance(loss, Loss)
        return None, self.engine.update(node.role or "", batch, loss, self._settings(node), node.call, self._terms(node))

    def stage(self, node: Node, batch: Batch) -> tuple[Batch, Tallies]:
        stage = self.plan.program.functions[node.name]
        assert isinstance(stage, Stage)
        result, metrics = self.engine.stage(stage, batch, self._settings(node), node.call, self._terms(node))
        self._keep_state(node, result)
        return result, metrics

    def _keep_state(self, node: Node, result: Batch) -> None:
        """A scalar that the flow's state holds is kept as the number it is across iterations, here and eagerly."""
        for output in node.outputs:
            if Column(node.id, output.name) in {slot.final for slot in self.plan.graph.state}:
                value = torch.tensor(float(result.data[output.source].value))
                result.data[output.source] = Data(Kind(Level.SCALAR, "float32"), value)

    def repeat(self, node: Node, batch: Batch) -> tuple[Batch, Tallies]:
        body = self.plan.bodies[node.id]
        names = {output.name for inner in body.graph.nodes if inner.op is Op.STATE for output in inner.outputs}
        state = {name: batch.data[name] for name in names}

        def run_body(prompts: Batch) -> Batch:
            return self.executor.run_body(body, prompts, self.outcome, state)

        settings = self._settings(node)
        return self.engine.repeat(run_body, batch, settings["groups"], settings["tries"])


PERFORM: dict[Op, Callable[[_Run, Node, Batch], tuple[Batch | None, Tallies]]] = {
    Op.GENERATE: _Run.generate,
    Op.LOGPROBS: _Run.forward,
    Op.VALUES: _Run.forward,
    Op.REWARD: _Run.reward,
    Op.UPDATE: _Run.update,
    Op.STAGE: _Run.stage,
    Op.REPEAT: _Run.repeat,
}
