"""The scheduler: a pure state machine. Events go in, instructions come out; it does no I/O and never waits.

A node is waiting, ready, running or done. Ready nodes start when their lane has room, longest remaining path first, ties in program
order. A column is freed when its last reader is done. After a failure nothing more starts and, when the last running node has
ended, everything is freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.graph.model import Column
from rlflow.plan import Plan


@dataclass(frozen=True)
class Start:
    """Run this node now."""

    node: int


@dataclass(frozen=True)
class Free:
    """Forget these columns."""

    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Finish:
    """Everything is done, or, after a failure, nothing runs any more."""

    failed: bool = False


Instruction = Start | Free | Finish


class Scheduler:
    """One iteration of a plan. ``room`` is how many nodes each lane runs at once; lanes it does not name have no limit."""

    def __init__(self, plan: Plan, room: Mapping[str, int]) -> None:
        self._plan = plan
        self._room = dict(room)
        self._waiting = {node: set(before) for node, before in plan.waits_for.items()}
        self._ready: dict[str, list[tuple[float, int]]] = {}
        self._running: set[int] = set()
        self._done: set[int] = set()
        self._readers = {column: set(nodes) for column, nodes in plan.readers.items()}
        self._stored: set[Column] = set()
        self._failed = False
        self._after: dict[int, list[int]] = {}
        for node, before in self._waiting.items():
            for earlier in before:
                self._after.setdefault(earlier, []).append(node)

    def begin(self) -> list[Instruction]:
        """The nodes that wait for nothing."""
        for node in [node for node, before in self._waiting.items() if not before]:
            self._make_ready(node)
        return [*self._start(), *self._finish()]

    def done(self, node: int) -> list[Instruction]:
        """A node has ended well and its kept columns are stored."""
        self._running.remove(node)
        self._done.add(node)
        self._stored |= {Column(node, name) for name in self._plan.keeps(self._plan.graph.nodes[node])}
        for later in self._after.get(node, []):
            self._waiting[later].discard(node)
            if not self._waiting[later]:
                self._make_ready(later)
        return [*self._free(node), *self._start(), *self._finish()]

    def failed(self, node: int) -> list[Instruction]:
        """A node has raised: nothing more starts."""
        self._running.remove(node)
        return self.halt()

    def halt(self) -> list[Instruction]:
        """Nothing more starts; what runs may end."""
        self._failed = True
        self._ready.clear()
        return self._finish()

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    def validate(self) -> None:
        """Assert what must hold between events."""
        ready = {node for queue in self._ready.values() for _, node in queue}
        states = [set(self._waiting), ready, self._running, self._done]
        assert sum(map(len, states)) == len(set().union(*states)), "a node is in one state"
        assert self._failed or set().union(*states) == set(self._plan.live), "no node is lost"
        for lane, limit in self._room.items():
            assert sum(self._plan.lane[node] == lane for node in self._running) <= limit, f"lane {lane} holds its limit"

    def _make_ready(self, node: int) -> None:
        del self._waiting[node]
        heapq.heappush(self._ready.setdefault(self._plan.lane[node], []), (-self._plan.priority[node], node))

    def _start(self) -> list[Instruction]:
        started: list[Instruction] = []
        for lane, queue in self._ready.items() if not self._failed else ():
            used = sum(self._plan.lane[node] == lane for node in self._running)
            while queue and used < self._room.get(lane, len(queue) + used):
                _, node = heapq.heappop(queue)
                self._running.add(node)
                started.append(Start(node))
                used += 1
        return started

    def _free(self, node: int) -> list[Instruction]:
        """Columns whose last reader this was, and its own that nobody reads."""
        read = {item.column for item in self._plan.graph.nodes[node].inputs}
        for column in read & self._readers.keys():
            self._readers[column].discard(node)
        own = {Column(node, name) for name in self._plan.keeps(self._plan.graph.nodes[node])}
        gone = [c for c in sorted(read | own, key=lambda c: (c.node, c.name)) if self._over(c)]
        self._stored -= set(gone)
        return [Free(tuple(gone))] if gone else []

    def _over(self, column: Column) -> bool:
        return column in self._stored and not self._readers.get(column) and column not in self._plan.held_to_end

    def _finish(self) -> list[Instruction]:
        if self._running or (not self._failed and len(self._done) < len(self._plan.live)):
            return []
        rest = tuple(sorted(self._stored, key=lambda c: (c.node, c.name)))
        self._stored.clear()
        return [*([Free(rest)] if rest else []), Finish(self._failed)]
