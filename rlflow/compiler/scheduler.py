"""The scheduler of an iteration: a state machine that takes events and returns instructions.

It does no I/O and never waits. A node is waiting, ready, running or done, and starts when it is ready and its
queue has room. The one with the most remaining work goes first; if there's a tie, the one that comes first in
the program. A column is freed when its last reader is done. After a failure, no more nodes start, and all
columns are freed once the last running node has ended. A sampling node may release chunks of its rows while
it is running, which pieces of other nodes wait for.

What an event costs depends only on the nodes that wait for the ended node, on the columns that it read or
returned, and on their queues.
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
    """Run a node, or a piece of a node, now."""

    node: int


@dataclass(frozen=True)
class Free:
    """Free columns that nothing will read any more."""

    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Finish:
    """End the iteration: all nodes are done, or one failed and none are running any more."""

    failed: bool = False


Instruction = StartNode | Free | Finish


@dataclass(slots=True)
class _Queue:
    """An executor queue: its limit, its number of running nodes, and a heap of ready nodes.

    The node at the top of the heap starts next. Queues get their ``number`` in the order in which they first
    have a ready node.
    """

    number: int
    limit: float
    used: int = 0
    ready: list[tuple[float, int]] = field(default_factory=list)


class Scheduler:
    """Schedules one iteration of a plan.

    ``room``: how many nodes each queue can run at once. Queues that aren't listed have no limit.
    """

    def __init__(self, plan: Plan, room: Mapping[str, int]) -> None:
        self._plan = plan
        self._room = dict(room)
        self._waiting = {node: len(before) for node, before in plan.waits_for.items()}
        self._queues: dict[str, _Queue] = {}
        self._running: set[int] = set()
        self._done: set[int] = set()
        self._chunks: set[int] = set()
        self._unread = {column: len(nodes) for column, nodes in plan.readers.items()}
        self._stored: set[Column] = set()
        self._failed = False

    def begin(self) -> list[Instruction]:
        """Start the iteration. Returns instructions to start all nodes that wait for nothing."""
        first = [node for node, before in self._waiting.items() if not before]
        return [*self._start([self._make_ready(node) for node in first]), *self._finish()]

    def done(self, node: int) -> list[Instruction]:
        """Record that a node or piece has succeeded and its kept columns are stored. Returns instructions."""
        lane = self._leave(node)
        self._done.add(node)
        self._stored.update(self._plan.gives[node])
        touched = [
            lane,
            *(self._make_ready(later) for later in self._plan.followers[node] if self._one_less(later)),
        ]
        return [*self._free(node), *self._start(touched), *self._finish()]

    def released(self, chunk: int) -> list[Instruction]:
        """Record that a running node has sampled a chunk of its rows. Returns instructions."""
        self._chunks.add(chunk)
        return self._start(
            [self._make_ready(later) for later in self._plan.followers[chunk] if self._one_less(later)]
        )

    def failed(self, node: int) -> list[Instruction]:
        """Record that a node or piece raised, so that no more nodes start. Returns instructions."""
        self._leave(node)
        return self.halt()

    def halt(self) -> list[Instruction]:
        """Start no more nodes, but let running ones end. Returns instructions."""
        self._failed = True
        for lane in self._queues.values():
            lane.ready.clear()
        return self._finish()

    @property
    def running(self) -> frozenset[int]:
        """The ids of units that have started but not ended."""
        return frozenset(self._running)

    def validate(self) -> None:
        """Assert the scheduler's invariants, which hold whenever no event is being handled."""
        ready = {node for lane in self._queues.values() for _, node in lane.ready}
        states = [set(self._waiting), ready, self._running, self._done]
        assert sum(map(len, states)) == len(set().union(*states)), "a node is in one state"
        assert self._failed or set().union(*states) == set(self._plan.units), "no node is lost"
        for name, lane in self._queues.items():
            assert sum(self._plan.lane[node] == name for node in self._running) == lane.used <= lane.limit, (
                f"queue {name} keeps its limit"
            )
            assert self._failed or not lane.ready or lane.used == lane.limit, (
                f"queue {name} has no free place while nodes are ready"
            )
        for node, left in self._waiting.items():
            assert left == len(self._plan.waits_for[node] - self._done - self._chunks) > 0, (
                "a node waits for units that are not done"
            )

    def _one_less(self, node: int) -> bool:
        """Count down the units that ``node`` waits for. Returns True once there are none left."""
        self._waiting[node] -= 1
        return not self._waiting[node]

    def _make_ready(self, node: int) -> _Queue:
        del self._waiting[node]
        name = self._plan.lane[node]
        if name not in self._queues:
            self._queues[name] = _Queue(len(self._queues), self._room.get(name, math.inf))
        heapq.heappush(self._queues[name].ready, (-self._plan.priority[node], node))
        return self._queues[name]

    def _leave(self, node: int) -> _Queue:
        self._running.remove(node)
        lane = self._queues[self._plan.lane[node]]
        lane.used -= 1
        return lane

    def _start(self, touched: Iterable[_Queue]) -> list[Instruction]:
        """Return instructions to start ready nodes in the queues ``touched``. Others can't have changed."""
        started: list[Instruction] = []
        for lane in sorted(touched, key=lambda lane: lane.number) if not self._failed else ():
            while lane.ready and lane.used < lane.limit:
                _, node = heapq.heappop(lane.ready)
                self._running.add(node)
                started.append(StartNode(node))
                lane.used += 1
        return started

    def _free(self, node: int) -> list[Instruction]:
        """Return the instruction to free columns that nothing reads any more after ``node``."""
        for column in self._plan.reads[node]:
            self._unread[column] -= 1
        columns = [
            column for column in (*self._plan.reads[node], *self._plan.gives[node]) if self._over(column)
        ]
        self._stored.difference_update(columns)
        return [Free(tuple(sorted(columns, key=_place)))] if columns else []

    def _over(self, column: Column) -> bool:
        return (
            not self._unread.get(column)
            and column in self._stored
            and column not in self._plan.keep_until_end
        )

    def _finish(self) -> list[Instruction]:
        if self._running or (not self._failed and len(self._done) < len(self._plan.units)):
            return []
        rest = tuple(sorted(self._stored, key=_place))
        self._stored.clear()
        return [*([Free(rest)] if rest else []), Finish(self._failed)]


def _place(column: Column) -> tuple[int, str]:
    return column.node, column.name
