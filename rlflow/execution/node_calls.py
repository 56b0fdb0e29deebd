"""Calls the engine for the nodes of a plan, with one function per kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlflow.author.batch import Batch, empty
from rlflow.author.columns import Kind, Level
from rlflow.author.memory import Reducer
from rlflow.author.node_options import (
    AskOptions,
    ChooseOptions,
    ConcatOptions,
    DrawOptions,
    EncodeOptions,
    FollowOptions,
    GenerateOptions,
    RepeatOptions,
    UpdateOptions,
    WriteOptions,
)
from rlflow.compiler.graph.model import FRESH_OPTIMIZER, Column, Node, Op
from rlflow.errors import SkipIteration
from rlflow.execution.computed import sampling_of, with_numbers
from rlflow.execution.engine import CallOptions
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.repeat import RepeatNames, repeat_groups
from rlflow.execution.row_ledger import PlacedRows, placer_of, source_of
from rlflow.execution.store import after_one_step
from rlflow.execution.tally import PartialMetrics
from rlflow.training.protocols import Sampling

if TYPE_CHECKING:
    from rlflow.execution.executor import PlanRun


def _call_options(run: PlanRun, node: Node, batch: Batch | None = None) -> CallOptions:
    ahead = batch is not None and len(batch) <= run.plan.ahead.get(node.id, -1)
    return CallOptions(run.plan.home.get(node.id), run.seconds(node, len(batch or ())), ahead, node=node.name)


def _settings(run: PlanRun, node: Node) -> Mapping[str, Any]:
    return run.plan.program.settings[node.name]


def _generate(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    numbers, batch = with_numbers({}, batch, None)
    sampling = sampling_of(node.options(GenerateOptions), numbers)
    if node.id in run.plan.chunks:
        return _streamed(run, node, batch, sampling), {}
    return run.engine.generate(node.role or "", batch, sampling, node.call, _call_options(run, node)), {}


def _streamed(run: PlanRun, node: Node, batch: Batch, sampling: Sampling) -> Batch:
    """Sample all rows and return them. The readers of each chunk may start as soon as it is sampled."""
    into = run.pieces.into(node)
    rows = run.engine.chunks(node.role or "", batch, sampling, node.call, into, _call_options(run, node))
    for number, released in enumerate(run.plan.chunks[node.id]):
        run.pieces.add(node, number, next(rows))
        run.chunk_ended(node.id, released)
    run.pieces.add(node, into.count - 1, next(rows))
    return next(rows)


def _forward(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    return run.engine.forward(
        node.role or "",
        tuple(output.source for output in node.outputs),
        batch,
        _call_options(run, node, batch),
    ), {}


def _reward(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    return run.engine.reward(node.role or "", batch, _call_options(run, node, batch))


def _update(run: PlanRun, node: Node, batch: Batch) -> tuple[None, PartialMetrics]:
    loss = run.plan.program.loss(node.name)
    fresh = FRESH_OPTIMIZER in batch and bool(batch.data[FRESH_OPTIMIZER].value)
    batch = batch.drop(*({FRESH_OPTIMIZER} & batch.data.keys()))
    settings, batch = with_numbers(_settings(run, node), batch, loss.signature)
    options, call_options = node.options(UpdateOptions), _call_options(run, node)
    metrics, rows = run.engine.update(
        node.role or "", batch, loss, options, settings, node.call, call_options, fresh
    )
    run.ledger.updates[node.id] = rows
    metrics = after_one_step(run.engine, node.role or "", batch, metrics, call_options)
    return None, {**metrics, **rows.metrics}


def _stage(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    stage = run.plan.program.stage(node.name)
    settings, batch = with_numbers(_settings(run, node), batch, stage.signature)
    result, metrics = run.engine.stage(stage, batch, settings, node.call, _call_options(run, node))
    _keep_state(run, node, result)
    _record_placed(run, node, batch, result)
    return result, metrics


def _record_placed(run: PlanRun, node: Node, batch: Batch, result: Batch) -> None:
    """If a stage returned tokens, record which rows it changed.

    Such a stage always gets all rows, because only reward calls and forward passes run in pieces.
    """
    source = next((output.source for output in node.outputs if output.name == "tokens"), None)
    if source is None or len(result) != len(run.store.axes.get(node.rows_axis, ())):
        return
    data = run.engine.gather(result.select(source)).data[source]
    before = (
        run.engine.gather(batch.select("tokens")).data["tokens"].lists()
        if "tokens" in batch
        else [None] * len(batch)
    )
    others = torch.tensor([one != other for one, other in zip(data.lists(), before, strict=True)])
    run.ledger.placed[node.id] = PlacedRows(others, data.row_lengths)


def _keep_state(run: PlanRun, node: Node, result: Batch) -> None:
    """Round state scalars to the precision kept between iterations, as eager flows do."""
    for output in node.outputs:
        if Column(node.id, output.name) in {slot.final for slot in run.plan.graph.state}:
            result.data[output.source] = run.engine.state_data(float(result.data[output.source].value))


def _ask(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    return run.engine.ask(batch, node.options(AskOptions).roles, _call_options(run, node, batch))


def _encode(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    return run.engine.encode(batch, node.options(EncodeOptions), _call_options(run, node, batch))


def _choose(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    """Return the rows selected by a column, and metrics. Raises SkipIteration if no row is left.

    Inside a `repeat`, an empty result is fine, because the `repeat` goes on with other prompts.
    """
    rows, metrics = run.engine.choose(batch, node.options(ChooseOptions))
    if not len(rows) and not run.body:
        run.store.put(node, rows, ())
        raise SkipIteration(f"{node.name} kept none of {len(batch)} rows")
    return rows, metrics


def _concat(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    parts, options = run.store.parts(run.plan, node, run.fetch), node.options(ConcatOptions)
    return run.engine.concat(parts, options, _call_options(run, node)), {}


def _read(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    return run.engine.read(str(node.memory), batch, _call_options(run, node)), {}


def _write(run: PlanRun, node: Node, batch: Batch) -> tuple[None, PartialMetrics]:
    options, names = node.options(WriteOptions), [item.parameter for item in node.inputs[1:]]
    reducers = dict(zip(names, map(Reducer, options.rules, options.rates), strict=True))
    run.outcome.memory[str(node.memory)], metrics = run.engine.write(str(node.memory), batch, reducers)
    return None, metrics


def _draw(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    name = str(node.memory)
    rows, numbers, metrics = run.engine.draw(name, node.name, node.options(DrawOptions))
    run.outcome.memory[name] = _buffer(run, name).after_draw(numbers)
    if not len(rows):  # columns without rows, for later nodes
        none = {output.source: empty(output.kind or Kind(Level.ROW)) for output in node.outputs}
        rows = Batch(rows.axis, none | rows.data)
    return run.engine.spread(rows, run.plan.home.get(node.id)), metrics


def _buffer(run: PlanRun, name: str) -> KeptBuffer:
    """Return a buffer as this iteration has changed it so far."""
    kept = run.outcome.memory.get(name)
    return kept if isinstance(kept, KeptBuffer) else run.engine.buffer(name)


def _put(run: PlanRun, node: Node, batch: Batch) -> tuple[None, PartialMetrics]:
    name = str(node.memory)
    before = _buffer(run, name)
    after, metrics = run.engine.put(before, batch)
    run.outcome.memory[name] = after
    run.ledger.puts[node.id] = after.totals.since(before.totals)
    return None, metrics


def _follow(run: PlanRun, node: Node, batch: Batch) -> tuple[None, PartialMetrics]:
    """Move a role's weights towards another's, if that role took a step and no column says otherwise."""
    options = node.options(FollowOptions)
    if node.inputs and not bool(batch.data[node.inputs[0].parameter].value):
        return None, {}
    updates = (each for each in run.plan.graph.nodes if each.op is Op.UPDATE and each.role == options.follows)
    stepped = any(run.ledger.updates[each.id].stepped for each in updates)
    return None, run.engine.follow(
        node.role or "", options.follows, options.mix, stepped, _call_options(run, node)
    )


def _repeat(run: PlanRun, node: Node, batch: Batch) -> tuple[Batch, PartialMetrics]:
    body = run.plan.bodies[node.id]
    states = {output.name for inner in body.graph.nodes if inner.op is Op.STATE for output in inner.outputs}
    state = run.engine.clock() | {name: batch.data[name] for name in states if name in batch.data}

    def run_body(prompts: Batch) -> Batch:
        return run.executor.run_body(body, prompts, run.outcome, state)

    options = node.options(RepeatOptions)
    names = RepeatNames(node.name, source_of(node), placer_of(node))
    return repeat_groups(
        run.engine, run_body, batch, options.groups, options.tries, run.outcome.account, names
    )


PERFORM: dict[Op, Callable[[PlanRun, Node, Batch], tuple[Batch | None, PartialMetrics]]] = {
    Op.GENERATE: _generate,
    Op.LOGPROBS: _forward,
    Op.VALUES: _forward,
    Op.REWARD: _reward,
    Op.UPDATE: _update,
    Op.STAGE: _stage,
    Op.REPEAT: _repeat,
    Op.ASK: _ask,
    Op.ENCODE: _encode,
    Op.CHOOSE: _choose,
    Op.CONCAT: _concat,
    Op.READ: _read,
    Op.WRITE: _write,
    Op.DRAW: _draw,
    Op.PUT: _put,
    Op.FOLLOW: _follow,
}
