"""Plans of flows whose calls aren't all due in every iteration: what each set of iterations takes, and means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.author.schedule import CallSchedule
from rlflow.compiler.passes.queues import room_of
from rlflow.compiler.passes.rank import COST
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.edges import edges
from rlflow.compiler.preview.layouts import Layouts
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.simulate import simulate


@dataclass(frozen=True)
class DueCalls:
    """The iterations in which the same calls are due, and what such an iteration takes.

    Seconds are in units of the default costs.
    """

    first: int  # the first of these iterations, counted from 0
    iterations: int  # how many there are in a cycle; 0: they are all before the cycles
    idle: tuple[str, ...]  # names of the calls that aren't due
    makespan: float
    bound: float  # lower bound of any schedule
    read: int  # bytes of columns that nodes read
    moved: int  # bytes of columns that move to another rank


@dataclass(frozen=True)
class Cycle:
    """After some iterations, a flow's calls are due in a cycle of iterations."""

    length: int
    schedules: tuple[tuple[str, CallSchedule], ...] = ()  # of the calls that aren't always due, by name
    sets: tuple[DueCalls, ...] = ()

    def mean(self, number: str) -> float:
        """Return the mean of a number of ``DueCalls`` over the iterations of a cycle."""
        return math.fsum(getattr(each, number) * each.iterations for each in self.sets) / self.length


def cycle_of(plan: Plan, assumed: Assumed) -> Cycle | None:
    """Return a flow's cycle, or None if all calls are due in every iteration."""
    if not plan.schedules:
        return None
    length = math.lcm(*(schedule.every for schedule in plan.schedules.values()))
    return Cycle(length, tuple(plan.schedules.items()), tuple(_sets(plan, assumed, length)))


def _sets(plan: Plan, assumed: Assumed, length: int) -> Iterator[DueCalls]:
    room = room_of(plan.placement)
    for due_set, own in plan.each():
        time = simulate(own, lambda node: COST.get(node.op, 0.0), room)
        sizes = Sizes.of(own.graph, assumed)
        moving = list(edges(own, sizes, Layouts.of(own, sizes) if own.placement else None))
        yield DueCalls(
            due_set.first,
            round(due_set.share * length),
            tuple(sorted(due_set.idle)),
            time.makespan,
            time.bound,
            sum(edge.bytes for edge in moving),
            sum(edge.moved for edge in moving),
        )
