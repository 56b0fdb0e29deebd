"""Prepare the inputs of `residency`, the compiler pass that plans when models are in memory.

The pass needs to know how much memory each rank needs and which parts of models can be offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from rlflow.compiler.passes.residency import Holding, MemoryLimit, residency
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Plan
from rlflow.compiler.residency_schedule import ModelPart
from rlflow.config.footprint import footprint, reward_models
from rlflow.config.options import Options
from rlflow.config.roles.bound import BoundSide, Roles, has_weight_check
from rlflow.config.roles.rewards import RewardNames
from rlflow.training.protocols import Capabilities

PARTS = {"adapters": "weights", "cache, at most": "cache"}  # name in a listing → name of the part


def within_memory(
    plan: Plan,
    roles: Roles,
    rewards: RewardNames,
    placement: Placement,
    options: Options,
    evaluated: str | None,
) -> Plan:
    """Return the plan with a schedule for offloading that keeps every rank within ``--memory``.

    Without that flag, the plan is returned unchanged. ``placement``: the plan's placement, or one with a
    single process. ``evaluated``: the role that samples held-out prompts. Raises PlanError if the models
    can't stay within the limit.
    """
    if options.memory is None:
        return plan
    committed = plan.graph.changed_roles if options.copies_every == 1 else ()
    weight_checks = (
        tuple(name for name, role in roles.items() if has_weight_check(role, options))
        if options.canary == 1
        else ()
    )
    holdings = tuple(_holdings(plan, roles, rewards, placement, options.dtype))
    return residency(
        plan, placement, MemoryLimit(options.memory, holdings, committed, weight_checks, evaluated)
    )


def _holdings(
    plan: Plan, roles: Roles, rewards: RewardNames, placement: Placement, dtype: str
) -> Iterator[Holding]:
    for name, role in roles.items():
        size = footprint(role, dtype, placement)
        pools_of_side = (placement.trainers, placement.generators)
        for half, pools, parts in zip(
            role.sides, pools_of_side, (size.trainer(), size.generator()), strict=True
        ):
            if name in pools:
                yield from _half(name, half, pools[name], parts)
    for pool, name, size in reward_models(plan.graph, roles, placement, rewards, dtype):
        yield Holding(pool, ModelPart(name, "reward", "weights"), size.weight_bytes, "stays")


def _half(role: str, half: BoundSide, pool: str, parts: Mapping[str, int | None]) -> Iterator[Holding]:
    sizes: dict[str, int | None] = {}
    for name, size in parts.items():
        part = PARTS.get(name, name)
        before = sizes.get(part, 0)
        sizes[part] = None if size is None or before is None else before + size
    for part, size in sizes.items():
        yield Holding(pool, ModelPart(role, half.half, part), size, _mobility(half.can, part))


def _mobility(can: Capabilities, part: str) -> Literal["moves", "passes", "stays"]:
    """Return how a part of a model can leave memory.

    "moves": it can be offloaded. "passes": it is in memory only while it is used. "stays": it is always in
    memory.
    """
    if part in can.movable:
        return "moves"
    return "passes" if part in can.passing else "stays"
