"""The scheduler: a pure state machine. Events go in, instructions come out; it does no I/O and never waits.

A node is waiting, ready, running or done. Ready nodes start when their lane has room, the one with most to
come after it first, ties in program order. A column is freed when its last reader is done. After a failure
nothing more starts and, when the last running node has ended, everything is freed. A node that samples may
let go of chunks of its rows while it runs; pieces of other nodes wait for these.

An event costs what it touches: the nodes that wait for the one that ended, the columns that it read or gave,
and their lanes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlflow.compiler.graph.model import Column
from rlflow.compiler.plan import Plan


@dataclass(frozen=True)
class StartNode:
    """An instruction: run this node, or piece of a node, now."""

    node: int


@dataclass(frozen=True)
class Free:
    """An instruction: these columns are read by nothing any more."""

    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Finish:
    """Everything is done, or, after a failure, nothing runs any more."""

    failed: bool = False


Instruction = StartNode | Free | Finish


@dataclass(slots=True)
class _Lane:
    """A lane: its number, by when it first had a ready node; the places taken; and ready nodes, the one to
    start first on top."""

    number: int
    limit: float
    used: int = 0
    ready: list[tuple[float, int]] = field(default_factory=list)


class Scheduler:
    """One iteration of a plan. ``room`` is how many nodes each lane runs at once; lanes it does not name have
    no limit."""

    def __init__(self, plan: Plan, room: Mapping[str, int]) -> None:
        self._plan = plan
        self._room = dict(room)
        self._waiting = {node: len(before) for node, before in plan.waits_for.items()}
        self._lanes: dict[str, _Lane] = {}
        self._running: set[int] = set()
        self._done: set[int] = set()
        self._chunks: set[int] = set()
        self._unread = {column: len(nodes) for column, nodes in plan.readers.items()}
        self._stored: set[Column] = set()
        self._failed = False

    def begin(self) -> list[Instruction]:
        """The nodes that wait for nothing."""
        first = [node for node, before in self._waiting.items() if not before]
        return [*self._start([self._make_ready(node) for node in first]), *self._finish()]

    def done(self, node: int) -> list[Instruction]:
        """A node has ended well and its kept columns are stored."""
        lane = self._leave(node)
        self._done.add(node)
        self._stored.update(self._plan.gives[node])
        touched = [
            lane,
            *(self._make_ready(later) for later in self._plan.followers[node] if self._one_less(later)),
        ]
        return [*self._free(node), *self._start(touched), *self._finish()]

    def released(self, chunk: int) -> list[Instruction]:
        """A chunk is there of the rows that a running node samples."""
        self._chunks.add(chunk)
        return self._start(
            [self._make_ready(later) for later in self._plan.followers[chunk] if self._one_less(later)]
        )

    def failed(self, node: int) -> list[Instruction]:
        """A node has raised: nothing more starts."""
        self._leave(node)
        return self.halt()

    def halt(self) -> list[Instruction]:
        """Nothing more starts; what runs may end."""
        self._failed = True
        for lane in self._lanes.values():
            lane.ready.clear()
        return self._finish()

    @property
    def running(self) -> frozenset[int]:
        """Nodes that were started and have not ended."""
        return frozenset(self._running)

    def validate(self) -> None:
        """Assert what must hold between events."""
        ready = {node for lane in self._lanes.values() for _, node in lane.ready}
        states = [set(self._waiting), ready, self._running, self._done]
        assert sum(map(len, states)) == len(set().union(*states)), "a node is in one state"
        assert self._failed or set().union(*states) == set(self._plan.units), "no node is lost"
        for name, lane in self._lanes.items():
            assert sum(self._plan.lane[node] == name for node in self._running) == lane.used <= lane.limit, (
                f"lane {name} holds its limit"
            )
            assert self._failed or not lane.ready or lane.used == lane.limit, (
                f"lane {name} leaves no place empty"
            )
        for node, left in self._waiting.items():
            assert left == len(self._plan.waits_for[node] - self._done - self._chunks) > 0, (
                "a node waits for what is not done"
            )

    def _one_less(self, node: int) -> bool:
        """Whether the node now waits for nothing."""
        self._waiting[node] -= 1
        return not self._waiting[node]

    def _make_ready(self, node: int) -> _Lane:
        del self._waiting[node]
        name = self._plan.lane[node]
        if name not in self._lanes:
            self._lanes[name] = _Lane(len(self._lanes), self._room.get(name, math.inf))
        heapq.heappush(self._lanes[name].ready, (-self._plan.priority[node], node))
        return self._lanes[name]

    def _leave(self, node: int) -> _Lane:
        self._running.remove(node)
        lane = self._lanes[self._plan.lane[node]]
        lane.used -= 1
        return lane

    def _start(self, touched: Iterable[_Lane]) -> list[Instruction]:
        """Fill the lanes that an event touched; no other can have got a place or a node."""
        started: list[Instruction] = []
        for lane in sorted(touched, key=lambda lane: lane.number) if not self._failed else ():
            while lane.ready and lane.used < lane.limit:
                _, node = heapq.heappop(lane.ready)
                self._running.add(node)
                started.append(StartNode(node))
                lane.used += 1
        return started

    def _free(self, node: int) -> list[Instruction]:
        """Columns whose last reader this was, and its own that nobody reads."""
        for column in self._plan.reads[node]:
            self._unread[column] -= 1
        columns = [
            column for column in (*self._plan.reads[node], *self._plan.gives[node]) if self._over(column)
        ]
        self._stored.difference_update(columns)
        return [Free(tuple(sorted(columns, key=_place)))] if columns else []

    def _over(self, column: Column) -> bool:
        return (
            not self._unread.get(column) and column in self._stored and column not in self._plan.held_to_end
        )

    def _finish(self) -> list[Instruction]:
        if self._running or (not self._failed and len(self._done) < len(self._plan.units)):
            return []
        rest = tuple(sorted(self._stored, key=_place))
        self._stored.clear()
        return [*([Free(rest)] if rest else []), Finish(self._failed)]


def _place(column: Column) -> tuple[int, str]:
    return column.node, column.name
