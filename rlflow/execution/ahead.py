"""Sampling ahead: iteration i + K samples while iteration i trains (staleness K).

The rows of iteration j are sampled with the weights that j - K iterations have made, whatever is ready first: what is sampled is
decided by numbers, never by timing. One thread samples, so that a generator has one set of weights at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.batch import Axis, Batch
from rlflow.execution import chance
from rlflow.execution.engine import Engine, Terms
from rlflow.graph.model import Node, Op
from rlflow.plan import Plan
from rlflow.spans import Span
from rlflow.training.protocols import Sampling


class Stream(Protocol):
    """Where prompts come from, in order; it can be put back."""

    def take(self, count: int) -> Batch: ...

    def state(self) -> Mapping[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Sampled:
    """The rows of one iteration by the node that samples them, when that was, and what ``Ahead.copy`` made of them."""

    rows: Mapping[int, Batch]
    spans: tuple[Span, ...] = ()
    copies: Mapping[int, Any] = field(default_factory=dict)


@dataclass
class Entry:
    """An iteration whose rows are sampled or being sampled: its prompts, and the stream before they were taken. weights: those that
    sample them, until they have."""

    cursor: Mapping[str, Any]
    prompts: Batch
    sampled: Future[Sampled]
    weights: dict[str, Any]


@dataclass(frozen=True)
class Queued:
    """An entry as it outlasts the workers: the stream before its prompts, and the copies of its rows by the node that samples them, or
    of rows that are not there yet the weights to sample them again."""

    cursor: Mapping[str, Any]
    copies: Mapping[int, Any]
    spans: tuple[Span, ...]
    weights: Mapping[str, Any]


@dataclass
class Ahead:
    """``staleness`` iterations ahead of the one that trains; never past the last of ``iterations``. ``copy`` begins to copy rows as soon
    as they are sampled."""

    plan: Plan
    engine: Engine
    stream: Stream
    staleness: int
    iterations: int
    prompts: int
    queue: dict[int, Entry] = field(default_factory=dict)
    copy: Callable[[Batch], Any] | None = None

    def __post_init__(self) -> None:
        self.nodes = sampling_nodes(self.plan)
        self._thread = self._opened()

    def _opened(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def advance(self, iteration: int) -> Entry:
        """Start what may be sampled when ``iteration`` begins to train; its own entry."""
        roles = sorted({str(node.role) for node in self.nodes})
        weights: dict[str, Any] = {}
        for number in range(iteration, min(iteration + self.staleness, self.iterations - 1) + 1):
            if number not in self.queue:
                weights = weights or {role: self.engine.frozen(role) for role in roles}
                self._begin(number, weights)
        return self.queue[iteration]

    def _begin(self, number: int, weights: Mapping[str, Any]) -> None:
        cursor, prompts, own = self.stream.state(), self._prompts(number), dict(weights)
        self.queue[number] = Entry(cursor, prompts, self._thread.submit(self._sample, number, prompts, own), own)

    def done(self, iteration: int) -> None:
        """The rows of an iteration are used up."""
        self.queue.pop(iteration, None)

    def cursor(self, iteration: int) -> Mapping[str, Any]:
        """Where the data of an iteration begin."""
        return self.queue[iteration].cursor if iteration in self.queue else self.stream.state()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def saved(self, iteration: int) -> dict[str, Any]:
        """What is sampled for ``iteration`` and those after it, as plain values and bytes; waits for what is being sampled."""
        found = {}
        for number, entry in sorted(self.queue.items()):
            if number >= iteration:
                rows = entry.sampled.result().rows
                found[str(number)] = {"cursor": dict(entry.cursor), "rows": {str(i): self.engine.packed(rows[i]) for i in rows}}
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``saved`` gave; leaves the stream behind the last of its prompts."""
        for number, entry in saved.items():
            rows = {node.id: entry["rows"][str(node.id)] for node in self.nodes}
            self._enter(int(number), entry["cursor"], rows, self._unpacked)

    def queued(self, iteration: int) -> dict[int, Queued]:
        """What is sampled for ``iteration`` and those after it, or being sampled, as it outlasts the workers."""
        return {number: _queued(entry) for number, entry in sorted(self.queue.items()) if number >= iteration}

    def drop(self) -> None:
        """Forget the queue, and let what is being sampled come to its end."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.queue.clear()
        self._thread = self._opened()

    def put_back(self, queued: Mapping[int, Queued], load: Callable[[Node, Any, Axis, int], Batch]) -> None:
        """Go on from what ``queued`` gave; ``load`` brings the copies of rows back. Leaves the stream behind the last of the prompts."""
        for number, each in queued.items():
            if each.weights:
                self.stream.load(each.cursor)
                self._begin(number, each.weights)
            else:
                self._enter(number, each.cursor, each.copies, load, each.spans)

    def _enter(
        self, number: int, cursor: Mapping[str, Any], held: Mapping[int, Any], load: Callable[[Node, Any, Axis, int], Batch],
        spans: tuple[Span, ...] = (),
    ) -> None:
        """An entry whose rows are there, held as ``load`` reads them."""
        self.stream.load(cursor)
        prompts = self._prompts(number)
        rows = {node.id: load(node, held[node.id], self._axis(node, prompts), number) for node in self.nodes}
        ready: Future[Sampled] = Future()
        ready.set_result(Sampled(rows, spans, self._copies(rows)))
        self.queue[number] = Entry(cursor, prompts, ready, {})

    def _prompts(self, iteration: int) -> Batch:
        """The next prompts of the data, where they are sampled from."""
        return self.engine.spread(self.stream.take(self.prompts), self.plan.home.get(self.nodes[0].id), iteration)

    def _axis(self, node: Node, prompts: Batch) -> Axis:
        """Of the rows that a node samples of these prompts."""
        return prompts.axis.repeat(Sampling(**self.plan.program.settings[node.name]).samples)

    def _unpacked(self, node: Node, payload: bytes, axis: Axis, iteration: int) -> Batch:
        return self.engine.unpacked(payload, axis, str(node.role), iteration)

    def _copies(self, rows: Mapping[int, Batch]) -> Mapping[int, Any]:
        return {i: self.copy(batch) for i, batch in rows.items()} if self.copy else {}

    def _sample(self, iteration: int, prompts: Batch, weights: dict[str, Any]) -> Sampled:
        rows, spans = {}, []
        for node in self.nodes:
            start = time.monotonic()
            seed = chance.derived(self.engine.seed, iteration, node.call)
            terms = Terms(None, node.timeout, iteration=iteration, weights=weights[str(node.role)])
            sampling = Sampling(**self.plan.program.settings[node.name])
            rows[node.id] = self.engine.sample(str(node.role), prompts, sampling, seed, terms)
            spans.append(Span(node.name, self.plan.lane[node.id], start, time.monotonic()))
        copies = self._copies(rows)
        weights.clear()
        return Sampled(rows, tuple(spans), copies)


def _queued(entry: Entry) -> Queued:
    weights = dict(entry.weights)
    if weights:  # not sampled yet, or not to the end
        return Queued(entry.cursor, {}, (), weights)
    sampled = entry.sampled.result()
    return Queued(entry.cursor, sampled.copies, sampled.spans, {})


def sampling_nodes(plan: Plan) -> list[Node]:
    """The nodes that sample from the prompts of the data."""
    return [node for node in (plan.graph.nodes[i] for i in plan.live) if node.op is Op.GENERATE]
