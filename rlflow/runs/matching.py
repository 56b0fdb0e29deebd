"""Layouts of trainers and samplers that save bytes: what is decided of them before a run starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rlflow.errors import PlanError
from rlflow.explain.transfers import ways
from rlflow.given.backends import backend, settings
from rlflow.given.flags import Given
from rlflow.graph.model import RoleUse
from rlflow.placement import HALVES, Placement
from rlflow.reshard.choices import Choices, orders
from rlflow.runs.kept import kept


class Matched(NamedTuple):
    """dims: the tensors that a role's trainer is to shard along the dimension that its sampler on the same ranks cuts, and which. outer:
    whether ranks that share a replica of the sampler are not adjacent."""

    dims: tuple[tuple[str, int], ...] = ()
    outer: bool = False


def matched(use: RoleUse, given: Given, where: Placement | None, adjacent: Collection[str] = ()) -> Matched:
    """What saves bytes, of what the backends do (``match_sampler``, ``rank_order``). adjacent: pools on which the ranks of a replica are
    adjacent where nobody says otherwise."""
    pool = where.generators.get(use.name) if where is not None else None
    if where is None or pool is None:
        return Matched()
    trainer, generator = (_settings(use, given, half) for half in HALVES)
    allowed = _orders(generator, where.pools[pool], pool in adjacent)
    found = _choices(use, given, where, getattr(generator, "tensor_parallel", 1))
    if found is None:
        return Matched(outer=allowed[0] == "outer")
    best = next(choice for choice in found.found if choice.order in allowed and (choice.dims == "first" or _matches(trainer)))
    return Matched(tuple(found.matched.items()) if best.dims == "matched" else (), best.order == "outer")


def _choices(use: RoleUse, given: Given, where: Placement, size: int) -> Choices | None:
    """None where weights do not move by a plan on the ranks that they are on."""
    pool = where.generators[use.name]
    if where.trainers.get(use.name) != pool or where.pools[pool] % size or not use.trained or given.options.weights == "gather":
        return None
    try:
        return ways(kept(use, given, where), where.pools[pool])
    except PlanError:  # of a folder that cannot be read, said where it is
        return None


def _orders(generator: object, ranks: int, adjacent: bool) -> tuple[str, ...]:
    """Those in which the generator's ranks may lie, the plainer one first."""
    known, asked = orders(ranks, getattr(generator, "tensor_parallel", 1)), getattr(generator, "rank_order", "inner")
    if asked == "auto":
        return known[:1] if adjacent else known
    return (asked,) if asked in known else known


def _matches(trainer: object) -> bool:
    """It shards whole tensors, and is asked to do so as the sampler."""
    return getattr(trainer, "match_sampler", False) and getattr(trainer, "shard", "none") == "full"


def _settings(use: RoleUse, given: Given, half: str) -> object:
    module, name = backend(given.backend(use.name, half)), half.capitalize()
    return settings(module, name, use.name, given.role(use.name)) if hasattr(module, name) else None
