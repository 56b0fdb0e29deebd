"""Sampling ahead: iteration i + K samples while iteration i trains (staleness K).

The rows of iteration j are sampled with the weights that j - K iterations have made, whatever is ready first: what is sampled is
decided by numbers, never by timing. One thread samples, so that a generator has one set of weights at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.batch import Batch
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
    """The rows of one iteration by the node that samples them, and when that was."""

    rows: Mapping[int, Batch]
    spans: tuple[Span, ...] = ()


@dataclass
class Entry:
    """An iteration whose rows are sampled or being sampled: its prompts, and the stream before they were taken."""

    cursor: Mapping[str, Any]
    prompts: Batch
    sampled: Future[Sampled]


@dataclass
class Ahead:
    """``staleness`` iterations ahead of the one that trains; never past the last of ``iterations``."""

    plan: Plan
    engine: Engine
    stream: Stream
    staleness: int
    iterations: int
    prompts: int
    queue: dict[int, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = sampling_nodes(self.plan)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def advance(self, iteration: int) -> Entry:
        """Start what may be sampled when ``iteration`` begins to train; its own entry."""
        roles = sorted({str(node.role) for node in self.nodes})
        weights: dict[str, Any] = {}
        for number in range(iteration, min(iteration + self.staleness, self.iterations - 1) + 1):
            if number not in self.queue:
                weights = weights or {role: self.engine.frozen(role) for role in roles}
                cursor = self.stream.state()
                prompts = self._prompts(number)
                self.queue[number] = Entry(cursor, prompts, self._thread.submit(self._sample, number, prompts, weights))
        return self.queue[iteration]

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
            self.stream.load(entry["cursor"])
            prompts = self._prompts(int(number))
            rows = {node.id: self._again(node, prompts, entry["rows"][str(node.id)], int(number)) for node in self.nodes}
            ready: Future[Sampled] = Future()
            ready.set_result(Sampled(rows))
            self.queue[int(number)] = Entry(entry["cursor"], prompts, ready)

    def _prompts(self, iteration: int) -> Batch:
        """The next prompts of the data, where they are sampled from."""
        return self.engine.spread(self.stream.take(self.prompts), self.plan.home.get(self.nodes[0].id), iteration)

    def _again(self, node: Node, prompts: Batch, payload: bytes, iteration: int) -> Batch:
        axis = prompts.axis.repeat(Sampling(**self.plan.program.settings[node.name]).samples)
        return self.engine.unpacked(payload, axis, str(node.role), iteration)

    def _sample(self, iteration: int, prompts: Batch, weights: Mapping[str, Any]) -> Sampled:
        rows, spans = {}, []
        for node in self.nodes:
            start = time.monotonic()
            seed = chance.derived(self.engine.seed, iteration, node.call)
            terms = Terms(None, node.timeout, iteration=iteration, weights=weights[str(node.role)], node=node.name)
            sampling = Sampling(**self.plan.program.settings[node.name])
            rows[node.id] = self.engine.sample(str(node.role), prompts, sampling, seed, terms)
            spans.append(Span(node.name, self.plan.lane[node.id], start, time.monotonic()))
        return Sampled(rows, tuple(spans))


def sampling_nodes(plan: Plan) -> list[Node]:
    """The nodes that sample from the prompts of the data."""
    return [node for node in (plan.graph.nodes[i] for i in plan.live) if node.op is Op.GENERATE]
