"""What the pass ``residency`` is told of a run: how much each rank holds, and what of it can be elsewhere, asked of the backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from rlflow.binding.roles import BoundHalf, Capabilities, Roles, has_canary
from rlflow.config.flags import RunConfig
from rlflow.memory.footprint import kept, reward_models
from rlflow.memory.schedule import ModelPart
from rlflow.passes.residency import Holding, MemoryLimit, residency
from rlflow.placement import Placement
from rlflow.plan import Plan

PARTS = {"adapters": "weights", "cache, at most": "cache"}  # what is called otherwise where it is listed


def resident(made: Plan, roles: Roles, where: Placement, given: RunConfig, evaluated: str | None) -> Plan:
    """The plan within ``--memory``; as it is without. ``where``: its placement, or that of one process. Raises PlanError."""
    options = given.options
    if options.memory is None:
        return made
    trained = tuple(name for name, role in roles.items() if role.use.trained)
    committed = trained if made.placement is not None and options.commit_every == 1 else ()
    canaries = tuple(name for name, role in roles.items() if has_canary(role, options)) if options.canary == 1 else ()
    return residency(made, where, MemoryLimit(options.memory, tuple(_holdings(made, roles, where, given)), committed, canaries, evaluated))


def _holdings(made: Plan, roles: Roles, where: Placement, given: RunConfig) -> Iterator[Holding]:
    for name, role in roles.items():
        held = kept(role, given.options.dtype, where)
        for half, pools, parts in zip(role.halves, (where.trainers, where.generators), (held.trainer(), held.generator()), strict=True):
            if name in pools:
                yield from _half(name, half, pools[name], parts)
    for pool, name, reward in reward_models(made.graph, roles, where, given):
        yield Holding(pool, ModelPart(name, "reward", "weights"), reward.weight_bytes, "stays")


def _half(role: str, half: BoundHalf, pool: str, held: Mapping[str, int | None]) -> Iterator[Holding]:
    sizes: dict[str, int | None] = {}
    for name, size in held.items():
        part = PARTS.get(name, name)
        before = sizes.get(part, 0)
        sizes[part] = None if size is None or before is None else before + size
    for part, size in sizes.items():
        yield Holding(pool, ModelPart(role, half.half, part), size, _how(half.can, part))


def _how(can: Capabilities, part: str) -> Literal["moves", "passes", "stays"]:
    if part in can.movable:
        return "moves"
    return "passes" if part in can.passing else "stays"
