"""Memory schedules: the model parts in a rank's memory at each step of an iteration.

A schedule has the fewest possible moves.

An iteration is a list of steps that repeats. Between two steps that need a part, the part stays in memory or
is moved out and back. A schedule makes this choice for each such gap. The search for the best schedule is
exact. This module only plans; it moves nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rich.filesize import decimal

from rlflow.errors import PlanError, Problem


@dataclass(frozen=True, order=True)
class ModelPart:
    """One kind of memory that the trainer or generator of a role uses on a rank, such as its optimizer."""

    role: str
    half: str  # side: trainer or generator; or reward, for a reward model with its own folder
    what: str  # weights, gradient, optimizer or cache

    def __str__(self) -> str:
        return f"{self.role}.{self.half} {self.what}"


Parts = frozenset[ModelPart]


def parts(role: str, half: str, *what: str) -> Parts:
    """Return the model parts of a trainer or generator (``half``).

    ``what``: weights, gradient, optimizer or cache.
    """
    return frozenset(ModelPart(role, half, each) for each in what)


def computing(role: str) -> Parts:
    """Return the parts that a role's trainer needs for a forward pass, or to write its weights to a file."""
    return parts(role, "trainer", "weights")


def copying(role: str) -> Parts:
    """Return the model parts that must be in memory to copy everything that training changes in a role."""
    return parts(role, "trainer", "weights", "optimizer")


def learning(role: str) -> Parts:
    """Return the model parts that an update of a role needs."""
    return parts(role, "trainer", "weights", "optimizer", "gradient")


def sampling(role: str) -> Parts:
    """Return the model parts that a role's generator needs to sample or to score."""
    return parts(role, "generator", "weights", "cache")


def syncing(role: str) -> Parts:
    """Return the model parts that a transfer of weights from a role's trainer to its generator needs."""
    return parts(role, "trainer", "weights") | parts(role, "generator", "weights")


@dataclass(frozen=True)
class MemoryStep:
    """A step of an iteration that uses model parts: the work of a node, or a part of it."""

    step: str  # name of the step
    needs: Parts  # parts that must be in memory during the step, and may be offloaded at other times
    # part → bytes that are in memory only during the step
    passing: Mapping[ModelPart, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Move:
    """A move of a model part out of memory, or back into memory, before a step."""

    before: str  # name of the step
    part: ModelPart
    bytes: int  # bytes of each rank
    away: bool  # True: the bytes are freed; False: the part is loaded again


@dataclass(frozen=True)
class MemorySchedule:
    """The steps of an iteration on the ranks of a pool, and the model parts in memory during each step."""

    pool: str
    moments: tuple[MemoryStep, ...]  # steps in order; after the last step, the first one follows
    sizes: Mapping[ModelPart, int]  # bytes on a rank of the parts that can be offloaded
    fixed: Mapping[ModelPart, int]  # bytes on a rank of the parts that cannot be offloaded
    limit: int  # bytes that a rank may hold
    awake: tuple[Parts, ...] = ()  # for each step, the parts of ``sizes`` that are in memory
    beside: tuple[MemoryStep, ...] = ()  # steps that sometimes run between two iterations

    def held(self, moment: MemoryStep, awake: Iterable[ModelPart]) -> int:
        """Return the bytes on a rank during the step ``moment`` if the model parts ``awake`` are in memory."""
        return (
            sum(self.fixed.values()) + sum(moment.passing.values()) + sum(self.sizes[part] for part in awake)
        )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves of one iteration, in order. Before a step, parts are first moved out and then moved back."""
        return tuple(move for at in range(len(self.moments)) for move in self._moves(at))

    def _moves(self, at: int) -> Iterator[Move]:
        step, now, before = self.moments[at].step, self.awake[at], self.awake[at - 1]
        yield from (Move(step, part, self.sizes[part], away=True) for part in sorted(before - now))
        yield from (Move(step, part, self.sizes[part], away=False) for part in sorted(now - before))

    @property
    def peak(self) -> int:
        """The maximum number of bytes in memory on a rank."""
        return max((self.held(*pair) for pair in zip(self.moments, self.awake, strict=True)), default=0)

    @property
    def peak_without(self) -> int:
        """The maximum number of bytes in memory on a rank, if all model parts always stayed there."""
        return max((self.held(moment, self.sizes) for moment in (*self.moments, *self.beside)), default=0)

    @property
    def moving(self) -> bool:
        """True if any model part is ever offloaded."""
        return any(set(awake) != set(self.sizes) for awake in self.awake) or self.peak_without > self.limit


# -- the fewest moves
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """Consecutive steps during which a model part is not needed."""

    part: ModelPart
    over: frozenset[int]  # the steps, by number
    unused: bool = False  # True: no step needs the part, so it may stay offloaded at no cost


def gaps(schedule: MemorySchedule) -> Iterator[Gap]:
    """Yield the gaps between consecutive uses of each model part. A gap may include the end of the iteration."""
    count = len(schedule.moments)
    for part in sorted(schedule.sizes):
        uses = [at for at, moment in enumerate(schedule.moments) if part in moment.needs]
        if not uses:
            yield Gap(part, frozenset(range(count)), unused=True)
        for one, other in zip(uses, [*uses[1:], uses[0] + count] if uses else (), strict=True):
            if other > one + 1:
                yield Gap(part, frozenset(at % count for at in range(one + 1, other)))


Cost = tuple[int, int, int]  # moves in an iteration, their bytes, unused parts that stay offloaded


def fewest(schedule: MemorySchedule) -> tuple[Parts, ...]:
    """For each step, return the model parts that are in memory, such that an iteration has the fewest moves.

    If several solutions have the fewest moves, the solution that moves the fewest bytes is returned. Each
    step must fit into memory by itself.
    """
    count, all_gaps = len(schedule.moments), list(gaps(schedule))
    room = [schedule.limit - schedule.held(moment, moment.needs) for moment in schedule.moments]
    rest = set(all_gaps) - _dropped(schedule, all_gaps, room)
    return tuple(
        schedule.moments[at].needs | {gap.part for gap in rest if at in gap.over} for at in range(count)
    )


Way = tuple[Cost, frozenset[Gap]]  # cost so far, and the gaps whose parts are offloaded


def _dropped(schedule: MemorySchedule, all_gaps: list[Gap], room: list[int]) -> frozenset[Gap]:
    """Return the gaps during which model parts are offloaded in a best solution.

    ``room``: for each step, the bytes that are free if only the needed parts are in memory. The search visits
    each step at which not all parts fit. It branches over the minimal sets of gaps that make the step fit. A
    best solution contains such a set for every step, and an offloaded part never hurts earlier steps. A first
    search with few branches gives an upper bound of the cost.
    """
    covering = [[gap for gap in all_gaps if at in gap.over] for at in range(len(room))]
    tight = {
        at: gaps_here
        for at, gaps_here in enumerate(covering)
        if sum(schedule.sizes[gap.part] for gap in gaps_here) > room[at]
    }
    known = _search(schedule, tight, room, (math.inf, 0, 0), few=16)
    return _search(schedule, tight, room, known[0])[1]


def _search(
    schedule: MemorySchedule,
    tight: Mapping[int, list[Gap]],
    room: list[int],
    most: tuple[float, int, int],
    few: int | None = None,
) -> Way:
    """Return the cheapest solution, as (cost, offloaded gaps), among solutions that cost at most ``most``.

    ``tight``: step → its gaps, for each step at which not all parts fit. ``few`` limits the number of
    solutions that are kept per step. If solutions differ only in gaps that no later step needs, only the
    cheapest is kept.
    """
    ways: dict[frozenset[Gap], Way] = {frozenset(): ((0, 0, 0), frozenset())}
    moments = list(tight)
    for place, at in enumerate(moments):
        later = {gap for other in moments[place + 1 :] for gap in tight[other]}
        on: dict[frozenset[Gap], Way] = {}
        for cost, dropped in sorted(ways.values(), key=lambda way: way[0])[:few]:
            there = [gap for gap in tight[at] if gap not in dropped]
            for freed in _least(schedule, there, sum(schedule.sizes[gap.part] for gap in there) - room[at]):
                way = _plus(schedule, cost, freed), dropped.union(freed)
                key = way[1] & later
                if way[0] <= most and (key not in on or way[0] < on[key][0]):
                    on[key] = way
        ways = on
    return min(ways.values(), key=lambda way: way[0])


def _least(schedule: MemorySchedule, there: list[Gap], excess: int) -> Iterator[tuple[Gap, ...]]:
    """Yield the minimal sets of gaps in ``there`` that free ``excess`` bytes.

    Without any one of its gaps, a set frees less.
    """
    sizes = [schedule.sizes[gap.part] for gap in there]
    for count in range(len(there) + 1):
        for chosen in itertools.combinations(range(len(there)), count):
            freed = sum(sizes[i] for i in chosen)
            if freed >= excess and all(freed - sizes[i] < excess for i in chosen):
                yield tuple(there[i] for i in chosen)


def _plus(schedule: MemorySchedule, cost: Cost, freed: tuple[Gap, ...]) -> Cost:
    moved = [schedule.sizes[gap.part] for gap in freed if not gap.unused]
    return cost[0] + 2 * len(moved), cost[1] + 2 * sum(moved), cost[2] + len(freed) - len(moved)


# -- parts that do not fit, and the proof of a schedule ------------------------------------------------


def too_large(schedule: MemorySchedule) -> Iterator[Problem]:
    """Yield a problem for each step that does not fit into memory by itself.

    If several such steps need the same parts, only the largest is reported.
    """
    reported: set[Parts] = set()
    over = [
        (schedule.held(moment, moment.needs) - schedule.limit, moment)
        for moment in (*schedule.moments, *schedule.beside)
    ]
    for excess, moment in sorted(over, key=lambda pair: -pair[0]):
        if excess > 0 and moment.needs not in reported:
            reported.add(moment.needs)
            yield _too_large(schedule, moment, excess)


def _too_large(schedule: MemorySchedule, moment: MemoryStep, excess: int) -> Problem:
    at_once = {part: schedule.sizes[part] for part in moment.needs} | dict(moment.passing)
    parts = ", ".join(f"{part} {decimal(size)}" for part, size in sorted(at_once.items()))
    always = [f"always {part} {decimal(size)}" for part, size in sorted(schedule.fixed.items())]
    parts_text = ", and ".join([parts, *always] if parts else always)
    sizes = at_once | dict(schedule.fixed)
    largest = max(sizes, key=lambda part: sizes[part])
    less = (
        f"a smaller cache (--{largest.role}.batch_tokens, --{largest.role}.kv_cache_memory_bytes)"
        if largest.what == "cache"
        else f"more ranks with a trainer that shards its state (--{largest.role}.trainer fsdp)"
    )
    return Problem(
        "memory",
        f"{moment.step} does not fit into a rank's memory on {schedule.pool}: {decimal(excess)} too much",
        found=parts_text,
        expected=f"at most {decimal(schedule.limit)} at once (--memory)",
        remedy=f"--memory {schedule.limit + excess}; or {less}, or another pool for the trainer or generator",
    )


def prove(schedule: MemorySchedule) -> int:
    """Check a schedule by simulating the moves of two iterations.

    Return the maximum number of bytes in memory on a rank. Raises PlanError if a needed part is missing, or
    if memory exceeds the limit at any step.
    """
    there: set[ModelPart] = set(schedule.awake[-1]) if schedule.awake else set()
    most = 0
    for at in [*range(len(schedule.moments))] * 2:
        moment = schedule.moments[at]
        for move in schedule._moves(at):
            (there.discard if move.away else there.add)(move.part)
        size = schedule.held(moment, there)
        if moment.needs - there or size > schedule.limit:
            raise PlanError.of(
                "memory-proof",
                f"the planned moves are wrong at {moment.step} on {schedule.pool}",
                found=f"{decimal(size)}; missing {', '.join(map(str, sorted(moment.needs - there))) or 'nothing'}",
                expected=f"all needed parts within {decimal(schedule.limit)}",
                remedy="remove --memory, and report this as a bug",
            )
        most = max(most, size)
    return most
