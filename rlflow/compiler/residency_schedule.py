"""Memory schedules: which parts of models are in a rank's memory at each step, with as few moves as possible.

An iteration is a list of steps that repeats. Between two steps that need a part, it either stays in memory or
is moved out and back in. A schedule decides this for each such gap, and is found by an exact search. This
module only plans, and doesn't move anything.
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
    """One kind of memory, such as the optimizer, of a role's trainer or generator on a rank."""

    role: str
    half: str  # side: trainer or generator; or reward, for a reward model with its own folder
    what: str  # weights, gradient, optimizer or cache

    def __str__(self) -> str:
        return f"{self.role}.{self.half} {self.what}"


Parts = frozenset[ModelPart]


def parts(role: str, half: str, *what: str) -> Parts:
    """Return the given parts of a trainer or generator (``half``): weights, gradient, optimizer or cache."""
    return frozenset(ModelPart(role, half, each) for each in what)


def computing(role: str) -> Parts:
    """Return what a role's trainer needs for a forward pass, or to write its weights to a file."""
    return parts(role, "trainer", "weights")


def copying(role: str) -> Parts:
    """Return what must be in memory to copy everything that training changes in a role."""
    return parts(role, "trainer", "weights", "optimizer")


def learning(role: str) -> Parts:
    """Return what an update of a role needs."""
    return parts(role, "trainer", "weights", "optimizer", "gradient")


def following(role: str, other: str) -> Parts:
    """Return what is needed to move a role's weights towards those of another role."""
    return computing(role) | computing(other)


def sampling(role: str) -> Parts:
    """Return what a role's generator needs to sample or to score."""
    return parts(role, "generator", "weights", "cache")


def syncing(role: str) -> Parts:
    """Return what is needed to transfer weights from a role's trainer to its generator."""
    return parts(role, "trainer", "weights") | parts(role, "generator", "weights")


@dataclass(frozen=True)
class MemoryStep:
    """A step of an iteration that uses parts of models: a node's work, or some of it."""

    step: str  # name of the step
    needs: Parts  # parts that must be in memory during the step, and may be offloaded at other times
    # part → bytes that are in memory only during the step
    passing: Mapping[ModelPart, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Move:
    """Moves a part of a model out of memory, or back in, before a step."""

    before: str  # name of the step
    part: ModelPart
    bytes: int  # bytes of each rank
    away: bool  # True: the bytes are freed; False: the part is loaded again


@dataclass(frozen=True)
class MemorySchedule:
    """The steps of an iteration on a pool's ranks, and the parts of models in memory during each step."""

    pool: str
    moments: tuple[MemoryStep, ...]  # steps in order; after the last step, the first one follows
    sizes: Mapping[ModelPart, int]  # bytes on a rank of the parts that can be offloaded
    fixed: Mapping[ModelPart, int]  # bytes on a rank of the parts that cannot be offloaded
    limit: int  # bytes that a rank may hold
    awake: tuple[Parts, ...] = ()  # for each step, the parts of ``sizes`` that are in memory
    beside: tuple[MemoryStep, ...] = ()  # steps that sometimes run between two iterations

    def held(self, moment: MemoryStep, awake: Iterable[ModelPart]) -> int:
        """Return the bytes in use on a rank during a step if the parts ``awake`` are in memory."""
        return (
            sum(self.fixed.values()) + sum(moment.passing.values()) + sum(self.sizes[part] for part in awake)
        )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves of one iteration, in order. Before each step, parts are moved out first, then back in."""
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
        """What ``peak`` would be if all parts always stayed in memory."""
        return max((self.held(moment, self.sizes) for moment in (*self.moments, *self.beside)), default=0)

    @property
    def moving(self) -> bool:
        """True if anything is ever offloaded."""
        return any(set(awake) != set(self.sizes) for awake in self.awake) or self.peak_without > self.limit


# -- the fewest moves
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """Consecutive steps that don't need some part of a model."""

    part: ModelPart
    over: frozenset[int]  # the steps, by number
    unused: bool = False  # True: no step needs the part, so it may stay offloaded at no cost


def gaps(schedule: MemorySchedule) -> Iterator[Gap]:
    """Yield the gaps between consecutive uses of each part. They can wrap around the iteration's end."""
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
    """Choose which parts are in memory at each step, so that an iteration has as few moves as possible.

    Among such solutions, the one that moves the fewest bytes is returned. Each step must fit into memory by
    itself.
    """
    count, all_gaps = len(schedule.moments), list(gaps(schedule))
    room = [schedule.limit - schedule.held(moment, moment.needs) for moment in schedule.moments]
    rest = set(all_gaps) - _dropped(schedule, all_gaps, room)
    return tuple(
        schedule.moments[at].needs | {gap.part for gap in rest if at in gap.over} for at in range(count)
    )


Way = tuple[Cost, frozenset[Gap]]  # cost so far, and the gaps whose parts are offloaded


def _dropped(schedule: MemorySchedule, all_gaps: list[Gap], room: list[int]) -> frozenset[Gap]:
    """Return the gaps during which parts are offloaded in an optimal solution.

    ``room``: for each step, how many bytes are free when only the needed parts are in memory. The search goes
    through the steps where not everything fits, and branches over the minimal sets of gaps that make a step
    fit. This is exact because an optimal solution contains such a set for every step, and offloading a part
    never hurts earlier steps. A first search with few branches gives an upper bound of the cost.
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
    """Return the cheapest solution that costs at most ``most``, as (cost, offloaded gaps).

    ``tight``: the gaps at each step where not everything fits. ``few`` limits how many solutions are kept per
    step. Of solutions that only differ in gaps that no later step needs, just the cheapest is kept.
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

    They are minimal in that each one needs all of its gaps to free that much.
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
    """Yield a problem for each step that doesn't fit into memory by itself.

    Of several such steps that need the same parts, only the largest is reported.
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
    """Check a schedule by simulating its moves over two iterations.

    Returns the maximum number of bytes in memory on a rank. Raises PlanError if a step lacks a part that it
    needs, or goes over the limit.
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
