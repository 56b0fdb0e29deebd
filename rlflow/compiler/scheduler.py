"""The scheduler: a pure state machine that takes events and returns instructions.

It does no I/O and never waits.

A node is waiting, ready, running or done. Ready nodes start when their queue has room. The node with the most
remaining work starts first; ties are resolved in program order. A column is freed when its last reader is
done. After a failure no node starts any more. When the last running node has ended, everything is freed. A
sampling node may release chunks of its rows while it runs; pieces of other nodes wait for these chunks.

The cost of an event depends only on the nodes that wait for the ended node, the columns that it read or gave,
and their queues.
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
    """Instruction: run this node, or piece of a node, now."""

    node: int


@dataclass(frozen=True)
class Free:
    """Instruction: free these columns, which nothing will read any more."""

    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Finish:
    """Instruction: the iteration is over. Either all nodes are done, or a node failed and no node runs any
    more."""

    failed: bool = False


Instruction = StartNode | Free | Finish


@dataclass(slots=True)
class _Queue:
    """A queue: its limit, the places in use, and a heap of ready nodes with the next one on top.

    ``number``: queues are numbered in the order in which they first had a ready node.
    """

    number: int
    limit: float
    used: int = 0
    ready: list[tuple[float, int]] = field(default_factory=list)


class Scheduler:
    """The schedule of one iteration of a plan.

    ``room``: queue → how many nodes it runs at once; queues without an entry have no limit.
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
        """Return the instructions that start the nodes that wait for nothing."""
        first = [node for node, before in self._waiting.items() if not before]
        return [*self._start([self._make_ready(node) for node in first]), *self._finish()]

    def done(self, node: int) -> list[Instruction]:
        """Handle a node that ended successfully and whose kept columns are stored."""
        lane = self._leave(node)
        self._done.add(node)
        self._stored.update(self._plan.gives[node])
        touched = [
            lane,
            *(self._make_ready(later) for later in self._plan.followers[node] if self._one_less(later)),
        ]
        return [*self._free(node), *self._start(touched), *self._finish()]

    def released(self, chunk: int) -> list[Instruction]:
        """Handle a chunk of the rows that a running node samples."""
        self._chunks.add(chunk)
        return self._start(
            [self._make_ready(later) for later in self._plan.followers[chunk] if self._one_less(later)]
        )

    def failed(self, node: int) -> list[Instruction]:
        """Handle a node that raised: no node starts any more."""
        self._leave(node)
        return self.halt()

    def halt(self) -> list[Instruction]:
        """Stop starting nodes; running nodes may end."""
        self._failed = True
        for lane in self._queues.values():
            lane.ready.clear()
        return self._finish()

    @property
    def running(self) -> frozenset[int]:
        """Nodes that have started and have not ended."""
        return frozenset(self._running)

    def validate(self) -> None:
        """Assert the invariants that hold between events."""
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
        """Count down the units that the node waits for; return True if it now waits for nothing."""
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
        """Start ready nodes in the queues that an event touched; other queues cannot have changed."""
        started: list[Instruction] = []
        for lane in sorted(touched, key=lambda lane: lane.number) if not self._failed else ():
            while lane.ready and lane.used < lane.limit:
                _, node = heapq.heappop(lane.ready)
                self._running.add(node)
                started.append(StartNode(node))
                lane.used += 1
        return started

    def _free(self, node: int) -> list[Instruction]:
        """Return the instruction to free the columns that nothing reads any more after this node."""
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
