"""The pass ``residency``: what of the models on a pool is put away and brought back, where it does not fit
into a rank's memory at once.

It works on the unrolled iteration in the order in which the scheduler starts nodes in virtual time, chunks
and the bodies of repeats included, and, where anything moves, it settles that order for what has models: a
run then moves just what was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rich.filesize import decimal

from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.passes.lanes import room_of
from rlflow.compiler.passes.rank import COST
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import PassNote, Plan
from rlflow.compiler.residency_schedule import (
    MemorySchedule,
    MemoryStep,
    ModelPart,
    computing,
    copying,
    fewest,
    learning,
    prove,
    sampling,
    syncing,
    too_large,
)
from rlflow.compiler.simulate import INSTANT, simulate
from rlflow.errors import PlanError, Problem

MODEL_LANE = "model"  # of a run in one process; on pools it is called like the pool
Step = tuple[str, Iterable[ModelPart]]  # what computes, and the parts that it needs


@dataclass(frozen=True)
class Holding:
    """A part that each rank of a pool holds: its bytes (None: not known), and whether it ``moves``,
    ``passes``, being there just while it is used, or ``stays``."""

    pool: str
    part: ModelPart
    bytes: int | None
    how: Literal["moves", "passes", "stays"]


@dataclass(frozen=True)
class MemoryLimit:
    """The limit on a rank's memory, and what comes and goes under it."""

    limit: int  # bytes that a rank may hold
    holdings: tuple[Holding, ...]
    committed: tuple[str, ...] = ()  # roles whose state is copied before each iteration
    canaries: tuple[str, ...] = ()  # roles of which both halves then score fixed tokens
    evaluated: str | None = None  # the role that samples now and then


def residency(plan: Plan, where: Placement, memory: MemoryLimit) -> Plan:
    """The fewest moves with which every pool keeps to the limit. ``where``: the plan's placement, or that of
    one process. Raises PlanError with all that cannot fit, or of which the size is not known."""
    courses = [_course(plan, pool, memory) for pool in where.pools]
    PlanError.refuse([*_unknown(memory), *(problem for course in courses for problem in too_large(course))])
    courses = [replace(course, awake=fewest(course)) for course in courses]
    peaks = [
        f"{decimal(prove(course))} on {course.pool} at {len(course.moments)} moments" for course in courses
    ]
    notes = (
        PassNote("residency", "; ".join(map(_told, courses))),
        PassNote("verify", "counted again, at most " + ", ".join(peaks)),
    )
    lanes = {course.pool if plan.placement else MODEL_LANE for course in courses if course.moving}
    return replace(_settled(plan, lanes), residency=tuple(courses), notes=(*plan.notes, *notes))


def _told(course: MemorySchedule) -> str:
    if not course.moving:
        return (
            f"on {course.pool} everything fits at once, {decimal(course.peak_without)} of "
            f"{decimal(course.limit)}"
        )
    bytes_moved = sum(move.bytes for move in course.moves)
    return (
        f"on {course.pool} {len(course.moves)} moves of {decimal(bytes_moved)} an iteration; at most "
        f"{decimal(course.peak)} there, {decimal(course.peak_without)} without"
    )


def _unknown(memory: MemoryLimit) -> Iterator[Problem]:
    for holding in memory.holdings:
        if holding.bytes is None:
            remedy = (
                f"--{holding.part.role}.kv_cache_memory_bytes BYTES"
                if holding.part.what == "cache"
                else "a folder with safetensors"
            )
            yield Problem(
                "memory-unknown",
                f"nobody can tell whether {holding.part} fits: its size is not known",
                found=f"--memory {memory.limit}",
                expected="parts of known sizes",
                remedy=f"{remedy}, or leave --memory out",
            )


# -- the course of an iteration
# ------------------------------------------------------------------------------------------------------


def _course(plan: Plan, pool: str, memory: MemoryLimit) -> MemorySchedule:
    """The steps of an iteration on a pool, in order, before it is decided which parts are in memory at
    each."""
    own = {holding.part: holding for holding in memory.holdings if holding.pool == pool}
    sizes, passing, fixed = (
        {part: holding.bytes or 0 for part, holding in own.items() if holding.how == how}
        for how in ("moves", "passes", "stays")
    )
    regular, beside = (
        [_moment(step, frozenset(parts), sizes, passing) for step, parts in steps if own.keys() & set(parts)]
        for steps in (_steps(plan, memory), _now_and_then(plan, memory))
    )
    return MemorySchedule(pool, tuple(_joined(regular)), sizes, fixed, memory.limit, beside=tuple(beside))


def _moment(
    step: str, parts: frozenset[ModelPart], sizes: Mapping[ModelPart, int], passing: Mapping[ModelPart, int]
) -> MemoryStep:
    return MemoryStep(
        step, parts.intersection(sizes), {part: passing[part] for part in sorted(parts.intersection(passing))}
    )


def _joined(moments: Iterable[MemoryStep]) -> Iterator[MemoryStep]:
    """Chunks of a node that follow each other are one moment."""
    last: MemoryStep | None = None
    for moment in moments:
        if moment != last:
            yield moment
        last = moment


def _steps(plan: Plan, memory: MemoryLimit) -> Iterator[Step]:
    """The memory steps of one iteration. A role that was changed in the iteration before delivers its weights
    before it samples."""
    stale = set(plan.graph.changed_roles)
    yield from ((f"the commit of {role}", copying(role)) for role in memory.committed)
    for role in memory.canaries:
        stale.discard(role)
        yield f"weights of {role}", syncing(role)
        yield f"the canary of {role}", sampling(role)
        yield f"the canary of {role}, trained", computing(role)
    for node in in_order(plan):
        yield from _steps_of(node, stale)


def _steps_of(node: Node, stale: set[str]) -> Iterator[Step]:
    """The memory steps of one node. ``stale``: roles that were changed after they last delivered their
    weights."""
    role = node.role
    if role is None:
        return
    if node.op is Op.GENERATE:
        if role in stale:
            stale.discard(role)
            yield f"weights of {role}", syncing(role)
        yield node.name, sampling(role)
    elif node.writes:
        stale.add(role)
        yield node.name, learning(role)
    else:  # a stage of the author's own may do anything with its trainer
        yield node.name, learning(role) if node.op is Op.STAGE else computing(role)


def _now_and_then(plan: Plan, memory: MemoryLimit) -> Iterator[Step]:
    """The steps between iterations that need models: checkpoints, evaluations."""
    for role in plan.graph.changed_roles:
        yield f"saving {role}", copying(role)
    if memory.evaluated is not None:
        yield f"weights of {memory.evaluated}", syncing(memory.evaluated)
        yield "the evaluation", sampling(memory.evaluated)
    if plan.evaluation is not None:
        stale = set(plan.graph.changed_roles)
        for node in in_order(plan.evaluation):
            yield from _steps_of(node, stale)


def in_order(plan: Plan) -> Iterator[Node]:
    """Nodes in the order in which they start in virtual time. A node in pieces comes once for each piece, the
    nodes of a `repeat` come once."""
    for unit in _started(plan):
        if unit in plan.bodies:
            yield from in_order(plan.bodies[unit])
        elif unit not in plan.in_pieces and plan.node(unit).op not in INSTANT:
            yield plan.node(unit)


def _started(plan: Plan) -> tuple[int, ...]:
    return simulate(plan, lambda node: COST.get(node.op, 0.0), room_of(plan.placement)).started


# -- the order that is settled
# -------------------------------------------------------------------------------------------------------


def _settled(plan: Plan, lanes: set[str]) -> Plan:
    """Everything with a model takes its place in these lanes in the order in which it was planned, rewards
    that are trained too."""
    if not lanes:
        return plan
    trained = {use.name for use in plan.graph.roles if use.trained}
    judged = {
        i: plan.home.get(i, MODEL_LANE)
        for i in plan.units
        if plan.node(i).op is Op.REWARD and plan.node(i).role in trained
    }
    lane = {**plan.lane, **{i: name for i, name in judged.items() if i not in plan.in_pieces}}
    plan = replace(plan, lane=lane)
    last: dict[str, int] = {}
    turns: dict[int, int] = {}
    for unit in _started(plan):
        name = plan.lane[unit]
        if name in lanes and name in last:
            turns[unit] = last[name]
        last[name] = unit
    bodies = {i: _settled(body, lanes) for i, body in plan.bodies.items()}
    return replace(plan, turns=turns, bodies=bodies)
