"""The pass ``residency``: if a pool's memory is too small, plan when to offload and reload parts of models.

It lists all steps of an iteration, including chunks and the bodies of repeats, in the order in which the
scheduler starts them in a simulation. If anything has to move, this order becomes fixed for all units that
use a model, so that a run makes exactly the planned moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rich.filesize import decimal

from rlflow.author.node_options import FollowOptions
from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.passes.queues import room_of
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
    following,
    learning,
    prove,
    sampling,
    syncing,
    too_large,
)
from rlflow.compiler.simulate import INSTANT, simulate
from rlflow.errors import PlanError, Problem

MODEL_QUEUE = "model"  # queue of models in one process; on pools it has the pool's name
Step = tuple[str, Iterable[ModelPart]]  # name of the step, and the parts that it needs


@dataclass(frozen=True)
class Holding:
    """A model part on each rank of a pool, and its bytes (None if unknown).

    ``how``: it ``moves`` if it can be offloaded, ``passes`` if it only exists while in use, and otherwise
    ``stays``.
    """

    pool: str
    part: ModelPart
    bytes: int | None
    how: Literal["moves", "passes", "stays"]


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a rank, and the model parts and roles that count toward it."""

    limit: int  # bytes that a rank may hold
    holdings: tuple[Holding, ...]
    committed: tuple[str, ...] = ()  # roles whose state is copied before each iteration
    weight_checks: tuple[str, ...] = ()  # roles with a weight check at the start of an iteration
    evaluated: str | None = None  # the role that samples in evaluations


def residency(plan: Plan, where: Placement, memory: MemoryLimit) -> Plan:
    """Keep every pool within the memory limit, with as few moves of model parts as possible.

    ``where``: the plan's placement, or a placement of everything in one process. Raises PlanError naming all
    parts that can't fit or whose size is unknown.
    """
    schedules = [_schedule(plan, pool, memory) for pool in where.pools]
    PlanError.refuse(
        [*_unknown(memory), *(problem for schedule in schedules for problem in too_large(schedule))]
    )
    schedules = [replace(schedule, awake=fewest(schedule)) for schedule in schedules]
    peaks = [
        f"{decimal(prove(schedule))} on {schedule.pool} in {len(schedule.moments)} steps"
        for schedule in schedules
    ]
    notes = (
        PassNote("residency", "; ".join(map(_summary, schedules))),
        PassNote("verify", "peaks recounted: " + ", ".join(peaks)),
    )
    queues = {schedule.pool if plan.placement else MODEL_QUEUE for schedule in schedules if schedule.moving}
    # each step of an iteration is also a step of the one in which all calls are due, and fits by itself
    variants = {
        idle: replace(_with_fixed_order(variant, queues), residency=tuple(schedules))
        for idle, variant in plan.variants.items()
    }
    plan = replace(_with_fixed_order(plan, queues), variants=variants)
    return replace(plan, residency=tuple(schedules), notes=(*plan.notes, *notes))


def _summary(schedule: MemorySchedule) -> str:
    if not schedule.moving:
        return (
            f"on {schedule.pool} everything fits at once, {decimal(schedule.peak_without)} of "
            f"{decimal(schedule.limit)}"
        )
    bytes_moved = sum(move.bytes for move in schedule.moves)
    return (
        f"on {schedule.pool} {len(schedule.moves)} moves of {decimal(bytes_moved)} per iteration; peak "
        f"{decimal(schedule.peak)}, {decimal(schedule.peak_without)} without moves"
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
                f"it is unknown whether {holding.part} fits, because its size is unknown",
                found=f"--memory {memory.limit}",
                expected="parts with known sizes",
                remedy=f"{remedy}, or remove --memory",
            )


# -- the memory steps of an iteration ------------------------------------------------------------------


def _schedule(plan: Plan, pool: str, memory: MemoryLimit) -> MemorySchedule:
    """Return a pool's memory schedule before any moves: the steps in order, and the sizes of model parts."""
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
    """Merge consecutive chunks of a node into one step."""
    last: MemoryStep | None = None
    for moment in moments:
        if moment != last:
            yield moment
        last = moment


def _steps(plan: Plan, memory: MemoryLimit) -> Iterator[Step]:
    """Yield the memory steps of one iteration, in order.

    Weights changed by an iteration are transferred in the next one, before the role samples.
    """
    stale = set(plan.graph.changed_roles)
    yield from ((f"the in-memory checkpoint of {role}", copying(role)) for role in memory.committed)
    for role in memory.weight_checks:
        stale.discard(role)
        yield f"weights of {role}", syncing(role)
        yield f"the weight check of {role}", sampling(role)
        yield f"the weight check of {role}, trained", computing(role)
    for node in in_order(plan):
        yield from _steps_of(node, stale)


def _steps_of(node: Node, stale: set[str]) -> Iterator[Step]:
    """Yield a node's memory steps.

    ``stale``: roles whose weights have changed since they were last transferred.
    """
    role = node.role
    if role is None:
        return
    if node.op is Op.GENERATE:
        if role in stale:
            stale.discard(role)
            yield f"weights of {role}", syncing(role)
        yield node.name, sampling(role)
    elif isinstance(node.settings, FollowOptions):
        stale.add(role)
        yield node.name, following(role, node.settings.follows)
    elif node.writes:
        stale.add(role)
        yield node.name, learning(role)
    else:  # the author's stage may do anything with its trainer
        yield node.name, learning(role) if node.op is Op.STAGE else computing(role)


def _now_and_then(plan: Plan, memory: MemoryLimit) -> Iterator[Step]:
    """Yield the memory steps of checkpoints and evaluations, which run between some iterations."""
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
    """Yield the nodes in the order in which they start in a simulation.

    A node that is cut into pieces is yielded once per piece, and a node in the body of a `repeat` only once.
    """
    for unit in _started(plan):
        if unit in plan.bodies:
            yield from in_order(plan.bodies[unit])
        elif unit not in plan.in_pieces and plan.node(unit).op not in INSTANT:
            yield plan.node(unit)


def _started(plan: Plan) -> tuple[int, ...]:
    return simulate(plan, lambda node: COST.get(node.op, 0.0), room_of(plan.placement)).started


# -- the fixed order -----------------------------------------------------------------------------------


def _with_fixed_order(plan: Plan, queues: set[str]) -> Plan:
    """Fix the order of all units in ``queues`` that use a model, including trained reward models."""
    if not queues:
        return plan
    trained = {use.name for use in plan.graph.roles if use.own_model}
    rewards = {
        i: plan.home.get(i, MODEL_QUEUE)
        for i in plan.units
        if plan.node(i).op is Op.REWARD and plan.node(i).role in trained
    }
    lane = {**plan.lane, **{i: name for i, name in rewards.items() if i not in plan.in_pieces}}
    plan = replace(plan, lane=lane)
    last: dict[str, int] = {}
    turns: dict[int, int] = {}
    for unit in _started(plan):
        name = plan.lane[unit]
        if name in queues and name in last:
            turns[unit] = last[name]
        last[name] = unit
    bodies = {i: _with_fixed_order(body, queues) for i, body in plan.bodies.items()}
    return replace(plan, turns=turns, bodies=bodies)
