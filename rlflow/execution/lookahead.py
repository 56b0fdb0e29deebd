"""Sampling ahead of training: while an iteration trains, later iterations sample (staleness K).

The rows of iteration j are sampled with the weights after j - K iterations, so the choice of weights depends
only on iteration numbers, never on timing. A flow with a `repeat` samples just one iteration ahead, with the
weights after j - 1 iterations, but later iterations can use the groups it carries over until they are K
iterations old. A single thread samples the iterations in order, because each starts from the data position
and the carry-over that the one before left.

This module also stores the carry-over of a `repeat`: groups that it kept beyond the number it needs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from rlflow.author.axis import Axis, FollowUpTokens
from rlflow.author.batch import Batch
from rlflow.author.figures import Figure, Of
from rlflow.author.node_options import ConcatOptions, GenerateOptions, RepeatOptions
from rlflow.compiler.graph.ancestry import ahead_of_training
from rlflow.compiler.graph.due import Idle, idle_in
from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.plan import Plan
from rlflow.compiler.spans import Span
from rlflow.errors import SkipIteration
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.execution.computed import sampling_of
from rlflow.execution.engine import CallOptions, Engine, KeptMemory
from rlflow.execution.executor import Executor
from rlflow.execution.iteration_outcome import Outcome, Sampled
from rlflow.execution.lineage import JoinedAxis
from rlflow.execution.queues import Queues
from rlflow.execution.repeat import RepeatNames, kept_groups, repeat_metrics, row_counts
from rlflow.execution.row_ledger import placer_of, source_of
from rlflow.execution.tally import known

NONE_IDLE: Idle = frozenset()  # no call is idle
Versions = Mapping[str, int]  # role → number of updates made to its weights


@dataclass(frozen=True)
class CarriedGroups:
    """Groups that a `repeat` carried over, all sampled with the same weights."""

    rows: Batch
    versions: Versions  # versions of these weights


@dataclass
class CarryOver:
    """All groups carried over by one `repeat`, in prompt order."""

    pieces: list[CarriedGroups] = field(default_factory=list)

    def opening(self, oldest: Versions) -> tuple[list[CarriedGroups], list[CarriedGroups]]:
        """Take all groups out of the carry-over. Return the groups that are still usable, and those too old.

        A group is usable if its weights aren't older than ``oldest``.
        """
        pieces, self.pieces = self.pieces, []
        young = [
            piece
            for piece in pieces
            if all(piece.versions[role] >= version for role, version in oldest.items())
        ]
        return young, [piece for piece in pieces if piece not in young]


def groups_of(pieces: Iterable[CarriedGroups]) -> int:
    """Return the total number of groups in ``pieces``."""
    return sum(piece.rows.axis.groups for piece in pieces)


def counted(
    engine: Engine, pieces: Iterable[CarriedGroups], names: RepeatNames
) -> Iterator[tuple[str, Count]]:
    """Yield the group, row and token counts of each piece, with the name to count them under."""
    for piece in pieces:
        yield from row_counts(engine, piece.rows, names)


def divided(pieces: Iterable[CarriedGroups], groups: int) -> tuple[list[CarriedGroups], list[CarriedGroups]]:
    """Split groups into the first ``groups`` and the rest.

    If there are fewer than that, they are all in the first part.
    """
    first: list[CarriedGroups] = []
    rest: list[CarriedGroups] = []
    for piece in pieces:
        wanted = piece.rows.axis.slots < groups - groups_of(first)
        for part, where in ((first, wanted), (rest, ~wanted)):
            if where.any():
                part.append(piece if where.all() else CarriedGroups(piece.rows.rows(where), piece.versions))
    return first, rest


CLOSING_SECONDS = 5.0  # longest wait in seconds for a running call of the sampling thread


class Stream(Protocol):
    """The position in the data from which the engine takes prompts. It can be saved and restored."""

    def state(self) -> Mapping[str, Any]:
        """Return the position in the stream, as plain values."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position that ``state`` returned."""

    def left_out(self, since: Mapping[str, Any]) -> Mapping[Figure, float]:
        """Return metrics of the records skipped since the position ``since``."""


@dataclass(frozen=True)
class SampledIteration:
    """The rows of one iteration that were sampled ahead."""

    cursor: Mapping[str, Any]  # position of the stream before its prompts were taken
    sampled: Sampled


class AheadPart:
    """The part of an iteration that runs ahead of training: the nodes that sample, and those they depend on.

    ``plan``: the plan of the iteration, in which some calls may not be due.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        live = [plan.graph.nodes[i] for i in plan.live]
        ahead = ahead_of_training(plan.graph)
        self.nodes = [node for node in live if node.id in ahead]
        self.chain = part_of(plan, ahead) if any(map(self._from_rows, self.nodes)) else None
        repeats = [node for node in live if node.op is Op.REPEAT]
        read = {item.column.node for node in live if node.op is not Op.REPEAT for item in node.inputs}
        # a `repeat` takes its prompts itself
        self.takes_prompts = not repeats or any(node.id in read for node in live if node.op is Op.DATA)

    def _from_rows(self, node: Node) -> bool:
        """True if a node reads any rows besides those of the data."""
        read = (self.plan.graph.nodes[item.column.node].op for item in node.inputs)
        return node.op not in (Op.GENERATE, Op.REPEAT) or (
            node.op is Op.GENERATE and any(op is not Op.DATA for op in read)
        )


@dataclass
class Ahead:
    """Samples the rows of later iterations in a thread of its own while an iteration trains."""

    plan: Plan
    engine: Engine
    queues: Queues
    stream: Stream
    staleness: int
    iterations: int  # iterations of the run; nothing is sampled after the last
    prompts: int  # prompts per iteration
    queue: dict[int, Future[SampledIteration]] = field(default_factory=dict)
    # iteration → versions of the sampling weights when the iteration began to train
    began: dict[int, Versions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = AheadPart(self.plan)  # of an iteration in which all calls are due
        self._parts = {idle: AheadPart(plan) for idle, plan in self.plan.variants.items()} | {
            NONE_IDLE: every
        }
        self.roles = sorted({str(node.role) for node in sampling(self.plan)})
        repeats = [i for i in self.plan.live if self.plan.graph.nodes[i].op is Op.REPEAT]
        self.carry_over = {i: CarryOver() for i in repeats}
        self.depth = 1 if self.carry_over else self.staleness
        self.home = self.plan.home.get(every.nodes[0].id) if every.nodes else None
        self._bodies = Executor(self.engine, self.queues)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def part(self, iteration: int) -> AheadPart:
        """Return the part of an iteration that runs ahead of training."""
        return self._parts[idle_in(self.plan.schedules, iteration)]

    def advance(self, iteration: int) -> Sampled:
        """Return the rows of ``iteration``, waiting until they are sampled, and start sampling ahead.

        This starts every later iteration that may be sampled while ``iteration`` trains. Raises SkipIteration
        if there is nothing to train on.
        """
        versions = self.began[iteration] = {role: self.engine.models[role].version for role in self.roles}
        self.began = {
            number: versions
            for number, versions in self.began.items()
            if number >= iteration - self.staleness
        }
        weights: dict[str, Any] = {}
        for number in range(iteration, min(iteration + self.depth, self.iterations - 1) + 1):
            if number not in self.queue:
                weights = weights or {role: self.engine.frozen(role) for role in self.roles}
                oldest = self.began[max(number - self.staleness, min(self.began))]
                engine = self.engine.at(number, weights, self._memory(number))
                self.queue[number] = self._thread.submit(self._sample, engine, versions, oldest)
        sampled = self.queue[iteration].result().sampled
        if sampled.skipped:
            skip = SkipIteration(sampled.skipped)
            skip.account = sampled.account
            raise skip
        return sampled

    def _memory(self, number: int) -> dict[str, KeptMemory]:
        """Return what the flow keeps, as iteration ``number`` reads it: without the writes of the last iterations."""
        return {name: kept.before(number - self.staleness) for name, kept in self.engine.memory.items()}

    def done(self, iteration: int) -> None:
        """Drop the sampled rows of an iteration that has finished."""
        self.queue.pop(iteration, None)

    def close(self) -> None:
        """Stop sampling: start no more calls, and wait up to CLOSING_SECONDS for the running one."""
        self._bodies.stopping = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([entry for entry in self.queue.values() if entry.running()], CLOSING_SECONDS)

    def drop(self) -> None:
        """Wait for the running call to end, then drop all sampled rows. Used after the pools have failed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.queue.clear()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    # -- in the sampling thread

    def _sample(self, engine: Engine, versions: Versions, oldest: Versions) -> SampledIteration:
        """Sample the rows of the iteration of ``engine``, with the weights and the memory that it has.

        ``versions``: the versions of these weights. ``oldest``: the oldest versions allowed for carried-over
        rows.
        """
        part = self.part(engine.iteration)
        self._bodies.engine = engine
        cursor, outcome, prompts = self.stream.state(), Outcome(), _Prompts(self, engine)
        rows: dict[int, Batch] = {}
        try:
            for node in part.nodes:
                start = time.monotonic()
                if node.op is Op.REPEAT:
                    rows[node.id] = self._repeat(engine, part, node, prompts, (versions, oldest), outcome)
                elif part.chain is None:
                    sampling, call_options = (
                        sampling_of(node.options(GenerateOptions)),
                        CallOptions(None, node.timeout, node=node.name),
                    )
                    rows[node.id] = engine.generate(
                        str(node.role), prompts.given(), sampling, node.call, call_options
                    )
                else:
                    continue
                outcome.spans.append(Span(node.name, part.plan.lane[node.id], start, time.monotonic()))
            if part.chain is not None:
                rows |= self._chained(engine, part, part.chain, prompts, outcome, rows)
            data = prompts.given() if part.takes_prompts else prompts.so_far()
        except SkipIteration as skip:
            return SampledIteration(
                cursor, Sampled(prompts.so_far(), skipped=str(skip), account=outcome.account)
            )
        outcome.metrics |= self.stream.left_out(cursor)
        return SampledIteration(
            cursor, Sampled(data, rows, outcome.metrics, tuple(outcome.spans), account=outcome.account)
        )

    def _chained(
        self,
        engine: Engine,
        part: AheadPart,
        chain: Plan,
        prompts: _Prompts,
        outcome: Outcome,
        repeated: Mapping[int, Batch],
    ) -> dict[int, Batch]:
        """Run the nodes that sample from sampled rows, and those in between. Return the rows by node id.

        ``chain``: the plan of these nodes. ``repeated``: the results of the repeats, which have already run.
        """
        data = prompts.given() if part.takes_prompts else prompts.so_far()
        wanted = [node.id for node in part.nodes if node.id not in repeated]
        return self._bodies.run_ahead(chain, data, outcome, engine.state_batch(data).data, repeated, wanted)

    def _repeat(
        self,
        engine: Engine,
        part: AheadPart,
        node: Node,
        prompts: _Prompts,
        bounds: tuple[Versions, Versions],
        outcome: Outcome,
    ) -> Batch:
        """Run a `repeat` and return its groups: first those carried over, then those that the body kept.

        ``bounds``: the versions to sample with, and the oldest usable ones. Raises SkipIteration if there are
        no groups.
        """
        (versions, oldest), options, home = bounds, node.options(RepeatOptions), self.plan.home.get(node.id)
        carry_over, groups = self.carry_over[node.id], options.groups
        names, account = RepeatNames(node.name, source_of(node), placer_of(node)), outcome.account
        for source, count in counted(engine, carry_over.pieces, names):
            account.open(source, count)
        opening, stale = carry_over.opening(oldest)
        for source, count in counted(engine, stale, names):
            account.end(
                source, End(RowOutcome.STALE, node.name, setting=f"staleness={self.staleness}"), count
            )

        def body(drawn: Batch) -> Batch:
            return self._bodies.run_body(
                part.plan.bodies[node.id], drawn, outcome, engine.state_batch(drawn).data
            )

        draws = prompts.draws(options.tries, needed=not opening)
        batches, tried = kept_groups(
            engine, body, draws, groups, account, names, [piece.rows for piece in opening]
        )
        fresh = [CarriedGroups(rows, versions) for rows in batches[len(opening) :]]
        first, rest = divided([*opening, *fresh], groups)
        later = self.engine.at(engine.iteration + 1)
        carry_over.pieces = [CarriedGroups(later.held(piece.rows, home), piece.versions) for piece in rest]
        for source, count in counted(engine, rest, names):
            account.end(source, End(RowOutcome.CARRIED, node.name, setting=f"groups={groups}"), count)
        own = {
            "carried": float(groups_of(opening)),
            "dropped": float(account.of(RowOutcome.STALE, node.name).groups),
        }
        metrics = {**repeat_metrics(account, names, tried, groups), **known(own)}
        outcome.log(node, metrics)
        if opening:  # a column may have different names in pieces from different iterations
            first = [CarriedGroups(engine.held(piece.rows, home), piece.versions) for piece in first]
        return engine.joined([piece.rows for piece in first])

    # -- checkpoints
    # --------------------------------------------------------------------------------------------------------

    def saved(self, iteration: int) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the sampled rows of ``iteration`` and later ones, for a checkpoint.

        The first value is plain data, with the data position where ``iteration`` starts as its ``cursor``.
        The second holds the rows, as file contents by file name. Waits for rows that are still being sampled.
        """
        entries = {
            number: entry.result() for number, entry in sorted(self.queue.items()) if number >= iteration
        }
        rows = {
            f"{number}.{node}": batch
            for number, entry in entries.items()
            for node, batch in entry.sampled.rows.items()
            if batch.data
        }
        rows |= {
            f"surplus.{node}.{i}": piece.rows
            for node, left in self.carry_over.items()
            for i, piece in enumerate(left.pieces)
        }
        stream = dict(self.stream.state())
        state = {
            "cursor": dict(next(iter(entries.values())).cursor) if entries else stream,
            "stream": stream,
            "next": max(entries, default=iteration - 1) + 1,
            "entries": {
                str(number): _plain(entry) | {"index": self._indices(number, entry)}
                for number, entry in entries.items()
            },
            "began": {str(number): dict(versions) for number, versions in self.began.items()},
            "surplus": {
                str(node): [dict(piece.versions) for piece in left.pieces]
                for node, left in self.carry_over.items()
            },
        }
        return state, {name: self.engine.packed(batch) for name, batch in rows.items()}

    def _indices(self, number: int, entry: SampledIteration) -> dict[str, list[list[int]]]:
        """For each `choose`, `ask` or `encode` node, return the indices of the rows that it took, by node id.

        For an `ask` that continues responses, the list also has the places in the responses.
        """
        axes = {
            node.id: entry.sampled.rows[node.id].axis
            for node in self.part(number).nodes
            if node.op in (Op.CHOOSE, Op.ASK, Op.ENCODE) and node.id in entry.sampled.rows
        }
        return {
            str(i): [part.tolist() for part in (axis.index, *(axis.cut or ()))]
            for i, axis in axes.items()
            if axis.index is not None
        }

    def restore(self, state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Restore the sampled rows from ``state`` and ``files``, as returned by ``saved``."""
        for number, entry in state["entries"].items():
            ready: Future[SampledIteration] = Future()
            ready.set_result(self._again(int(number), entry, files))
            self.queue[int(number)] = ready
        later = self.engine.at(state["next"])
        for node, left in self.carry_over.items():
            home, versions = self.plan.home.get(node), state["surplus"].get(str(node), ())
            left.pieces = [
                CarriedGroups(later.unpacked(files[f"surplus.{node}.{i}"], None, home), each)
                for i, each in enumerate(versions)
            ]
        self.began = {int(number): versions for number, versions in state["began"].items()}
        self.stream.load(state["stream"])

    def _again(self, number: int, entry: Mapping[str, Any], files: Mapping[str, bytes]) -> SampledIteration:
        self.stream.load(entry["cursor"])
        engine, rows = self.engine.at(number, memory=self._memory(number)), {}
        prompts = engine.spread(engine.take(entry["prompts"]), self.home)
        axes = {node.axis: prompts.axis for node in self.plan.graph.nodes if node.op is Op.DATA}
        for node in self.part(number).nodes if not entry["skipped"] else ():
            axis = self._axis(node, axes, entry["index"])
            packed = files.get(f"{number}.{node.id}")
            if packed is not None:
                rows[node.id] = engine.unpacked(packed, axis, self.plan.home.get(node.id))
            elif axis is not None:
                rows[node.id] = Batch(axis, {})
            axes[node.rows_axis] = rows[node.id].axis
        metrics = {Figure(Of(of), *rest): value for of, *rest, value in entry.get("figures", ())}
        return SampledIteration(
            entry["cursor"],
            Sampled(
                prompts,
                rows,
                metrics,
                skipped=entry["skipped"],
                account=RowAccount.from_json(entry["account"]),
            ),
        )

    def _axis(
        self, node: Node, axes: Mapping[int, Axis], index: Mapping[str, list[list[int]]]
    ) -> Axis | None:
        """Return the row axis of a node when rows are restored.

        Returns None for a `repeat`, whose rows have an axis of their own. ``axes``: the axes known so far.
        ``index``: what ``_indices`` returned.
        """
        parts = [torch.tensor(part, dtype=torch.int64) for part in index.get(str(node.id), ())]
        match node.op:
            case Op.REPEAT:
                return None
            case Op.GENERATE:
                return axes[node.axis].repeat(node.options(GenerateOptions).samples)
            case Op.CHOOSE:
                return axes[node.axis].take(parts[0])
            case Op.ASK:
                return axes[node.axis].ask(parts[0], FollowUpTokens(*parts[1:]) if parts[1:] else None)
            case Op.ENCODE:
                return axes[node.axis].encode(parts[0])
            case Op.CONCAT:
                joined = [axes[part] for part in self.plan.graph.axes[node.rows_axis].parts]
                return JoinedAxis.of(joined, node.options(ConcatOptions)).axis
        return axes[node.axis]


def part_of(plan: Plan, nodes: Collection[int]) -> Plan:
    """Return a plan with only the nodes ``nodes``, the data and the state.

    It stores the same columns of these nodes as ``plan`` does.
    """
    live = tuple(i for i in plan.live if i in nodes or plan.graph.nodes[i].op in (Op.DATA, Op.STATE))
    columns = frozenset(column for column in plan.columns if column.node in live)
    return replace(
        plan, live=live, columns=columns, keep_until_end=columns, chunks={}, pieces={}, turns={}, ahead={}
    )


class _Prompts:
    """The prompts of one iteration.

    The flow's own prompts are taken from the data when a node first reads them, and more are taken for each
    further try of a `repeat`.
    """

    def __init__(self, ahead: Ahead, engine: Engine) -> None:
        self._ahead, self._engine = ahead, engine
        self._given: Batch | None = None

    def given(self) -> Batch:
        if self._given is None:
            self._given = self._take(self._ahead.prompts)
        return self._given

    def so_far(self) -> Batch:
        """Return the prompts taken so far, or an empty batch if no node has read any."""
        return self._take(0) if self._given is None else self._given

    def draws(self, tries: int, needed: bool) -> Iterator[Batch]:
        """Yield the prompts for each try of a `repeat`.

        Raises SkipIteration if there are no prompts although they are ``needed``.
        """
        try:
            first = self.given()
        except SkipIteration:
            if needed:
                raise
            return
        yield first
        more = (self._take(self._ahead.prompts) for _ in range(tries - 1))
        yield from itertools.takewhile(len, more)  # records drawn by weight may be used up

    def _take(self, count: int) -> Batch:
        return self._engine.spread(self._engine.take(count), self._ahead.home)


def _plain(entry: SampledIteration) -> dict[str, Any]:
    sampled = entry.sampled
    return {
        "cursor": dict(entry.cursor),
        "prompts": len(sampled.prompts),
        "skipped": sampled.skipped,
        "account": sampled.account.as_json(),
        "figures": [[*figure, value] for figure, value in sampled.metrics.items()],
    }


def sampling(plan: Plan) -> Iterator[Node]:
    """Yield the nodes of a plan that sample, including those in the bodies of repeats."""
    for i in plan.live:
        if i in plan.bodies:
            yield from sampling(plan.bodies[i])
        elif plan.graph.nodes[i].op is Op.GENERATE:
            yield plan.graph.nodes[i]
