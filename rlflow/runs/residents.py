"""What the pass ``residency`` is told of a run: how much each rank holds, and what of it can be elsewhere, asked of the backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rlflow.given.backends import backend, settings
from rlflow.given.flags import Given
from rlflow.graph.model import RoleUse
from rlflow.passes.residency import Holding, Memory, residency
from rlflow.placement import HALVES, Placement
from rlflow.plan import Plan
from rlflow.residency import Part
from rlflow.runs.canary import compared
from rlflow.runs.kept import device_in, kept, reward_models

PARTS = {"adapters": "weights", "cache, at most": "cache"}  # what is called otherwise where it is listed


def resident(made: Plan, uses: list[RoleUse], where: Placement, given: Given, evaluated: str | None) -> Plan:
    """The plan within ``--memory``; as it is without. ``where``: its placement, or that of one process. Raises PlanError."""
    options = given.options
    if options.memory is None:
        return made
    trained = tuple(use.name for use in uses if use.trained)
    committed = trained if made.placement is not None and options.commit_every == 1 else ()
    canaries = tuple(use.name for use in uses if compared(use, given)) if options.canary == 1 else ()
    return residency(made, where, Memory(options.memory, tuple(_holdings(made, uses, where, given)), committed, canaries, evaluated))


def _holdings(made: Plan, uses: list[RoleUse], where: Placement, given: Given) -> Iterator[Holding]:
    for use in uses:
        held = kept(use, given, where)
        for half, pools, parts in zip(HALVES, (where.trainers, where.generators), (held.trainer(), held.generator()), strict=True):
            if use.name in pools:
                yield from _half(use.name, half, pools[use.name], parts, given)
    for pool, name, reward in reward_models(made.graph, uses, where, given):
        yield Holding(pool, Part(name, "reward", "weights"), reward.weight_bytes, "stays")


def _half(role: str, half: str, pool: str, held: Mapping[str, int | None], given: Given) -> Iterator[Holding]:
    sizes: dict[str, int | None] = {}
    for name, size in held.items():
        part = PARTS.get(name, name)
        before = sizes.get(part, 0)
        sizes[part] = None if size is None or before is None else before + size
    module = backend(given.backend(role, half))
    kind = getattr(module, half.capitalize())
    chosen = settings(module, half.capitalize(), role, given.role(role))
    for part, size in sizes.items():
        yield Holding(pool, Part(role, half, part), size, _how(kind, chosen, part, device_in(given)))


def _how(kind: Any, chosen: Any, part: str, device: str) -> Literal["moves", "passes", "stays"]:
    if hasattr(kind, "movable") and part in kind.movable(chosen, device):
        return "moves"
    return "passes" if part in getattr(kind, "passing", ()) else "stays"
