"""Simulate an iteration by running the real scheduler with given durations in place of work.

This shows how long an iteration takes, which nodes are responsible for that, and a lower bound for any
schedule.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.passes.rank import remaining
from rlflow.compiler.plan import Plan
from rlflow.compiler.scheduler import Finish, Instruction, Scheduler, StartNode
from rlflow.compiler.spans import Span, busy, chain, critical_path
from rlflow.errors import PlanError, listed

Seconds = Mapping[int, float] | Callable[[Node], float]

# columns that exist when an iteration begins; as in a run, they have no span
INSTANT = (Op.DATA, Op.STATE)


@dataclass(frozen=True)
class CriticalNode:
    """A node on the critical path of a simulated iteration."""

    node: str
    after: str | None = None  # the node that it waited for; None for the first
    # "node" if it reads a result of the node ``after``, "lane" if it only waited for a place in its queue
    why: str = ""


@dataclass(frozen=True)
class Simulation:
    """The result of simulating an iteration."""

    spans: tuple[Span, ...]  # in the order in which nodes ended
    longest: float  # seconds of the longest path
    room: Mapping[str, int]  # queue → nodes that it runs at once
    started: tuple[int, ...] = ()  # nodes and pieces in the order in which they started

    @property
    def makespan(self) -> float:
        """The seconds from the start of the iteration until its last node ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bound(self) -> float:
        """A lower bound in seconds for any schedule.

        This is the longest path or, if it takes longer, the busiest queue's work divided by its room.
        """
        limited = {
            lane: share for lane, share in busy(self.spans, 1.0, self.room).items() if lane in self.room
        }
        return max(self.longest, *limited.values(), 0.0)

    @property
    def busy(self) -> dict[str, float]:
        """For each queue, the share of its places in use, averaged over the iteration."""
        return busy(self.spans, self.makespan, self.room)

    @cached_property
    def critical(self) -> tuple[CriticalNode, ...]:
        """The chain of nodes that determines the iteration's duration, each with the node it waited for."""
        path = critical_path(self.spans, self.room)
        first = (CriticalNode(span.node) for span in path[:1])
        pairs = itertools.pairwise(path)
        return (
            *first,
            *(CriticalNode(b.node, a.node, "node" if a.node in b.waits_for else "lane") for a, b in pairs),
        )

    @property
    def decided_by(self) -> list[str]:
        """The names of the nodes along the critical path, each once."""
        return chain(step.node for step in self.critical)

    @cached_property
    def by_name(self) -> dict[str, Span]:
        """Each node's span, by name."""
        return {span.node: span for span in self.spans}

    def together(self, *names: str) -> bool:
        """Return True if all these nodes are running at some moment."""
        spans = [self.by_name[name] for name in names]
        return max(span.start for span in spans) < min(span.end for span in spans)


def evenly(rows: float) -> float:
    """Assume a constant rate: a share ``rows`` of a node's rows is done after that share of its time."""
    return rows


def simulate(
    plan: Plan, seconds: Seconds, room: Mapping[str, int], ended: Callable[[float], float] = evenly
) -> Simulation:
    """Simulate one iteration of a plan, which may be unrolled.

    seconds: node id → duration, or a function from a node to its duration. A `repeat` counts as one node.

    room: how many nodes each queue can run at once.

    ended: for streamed rows, a function from a share of the rows to the share of the sampling node's time
    after which they are done. It rises from 0 to 1.

    Raises PlanError if a node has no duration, or if some nodes can never start.
    """
    seconds_of = plan.shared(durations(plan, seconds))
    clock = _Clock(plan, seconds_of, ended)
    scheduler = Scheduler(plan, room)
    instructions = scheduler.begin()
    while not clock.carry_out(instructions):
        unit = clock.next()
        instructions = scheduler.released(unit) if unit in plan.source_of else scheduler.done(unit)
    after = remaining(plan, seconds_of, room={})
    bound = max((seconds_of[i] + after[i] for i in plan.units), default=0.0)
    return Simulation(tuple(clock.spans), bound, dict(room), tuple(clock.started))


def durations(plan: Plan, seconds: Seconds) -> dict[int, float]:
    """Return each live node's seconds. Raises PlanError if any are missing, negative or infinite."""
    nodes = [plan.graph.nodes[i] for i in plan.live]
    known = {
        node.id: seconds(node) if callable(seconds) else seconds.get(node.id, math.nan)
        for node in nodes
        if node.op not in INSTANT
    }
    wrong = [
        f"{plan.graph.nodes[i].name} ({value})" for i, value in known.items() if not 0 <= value < math.inf
    ]
    if wrong:
        raise PlanError.of(
            "no-duration",
            "a simulation needs the duration of every node",
            found=listed(wrong),
            expected="finite seconds, 0 or more",
            remedy="give seconds for each live node that runs something",
        )
    return {node.id: known.get(node.id, 0.0) for node in nodes}


@dataclass
class _Clock:
    """The running nodes, ordered by when they end; those that end together are in program order."""

    plan: Plan  # the plan that runs
    seconds: Mapping[int, float]  # node or piece → its duration
    # share of a node's rows → share of its time after which they have ended
    ended: Callable[[float], float] = evenly
    now: float = 0.0  # virtual time
    spans: list[Span] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    # heap of running units: (end, not a chunk, unit)
    _ends: list[tuple[float, bool, int]] = field(default_factory=list)
    _since: dict[int, float] = field(default_factory=dict)  # unit → when it started

    def carry_out(self, instructions: Iterable[Instruction]) -> bool:
        """Carry out the scheduler's instructions. Returns True if the iteration is over."""
        for instruction in instructions:
            if isinstance(instruction, StartNode):
                self._start(instruction.node)
        return any(isinstance(instruction, Finish) for instruction in instructions)

    def _start(self, unit: int) -> None:
        self._since[unit] = self.now
        self.started.append(unit)
        heapq.heappush(self._ends, (self.now + self.seconds[unit], True, unit))
        chunks = self.plan.chunks.get(unit, ())
        for number, chunk in enumerate(chunks, 1):
            heapq.heappush(
                self._ends,
                (self.now + self.ended(number / (len(chunks) + 1)) * self.seconds[unit], False, chunk),
            )

    def next(self) -> int:
        """Return the node, piece or chunk that ends next.

        A chunk ends after its share of the sampling node's time.
        """
        if not self._ends:
            raise self._stuck()
        self.now, _, ended = heapq.heappop(self._ends)
        unit = self.plan.source_of.get(ended, ended)
        node, lane = self.plan.node(unit), self.plan.lane[unit]
        if node.op not in INSTANT and unit not in self.plan.in_pieces:
            self.spans.append(
                Span(node.name, lane, self._since[unit], self.now, self.plan.names_before(unit))
            )
            self._since[unit] = self.now
        return ended

    def _stuck(self) -> PlanError:
        ran = {span.node for span in self.spans}
        left = [
            node.name
            for i in self.plan.live
            if (node := self.plan.graph.nodes[i]).name not in ran and node.op not in INSTANT
        ]
        return PlanError.of(
            "never-starts",
            "nodes are left but nothing runs",
            found=listed(left),
            expected="every node to run",
            remedy="give every queue room for at least 1 node",
        )
