"""Layouts of trainers and samplers that save bytes: what is decided of them before a run starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rlflow.errors import PlanError
from rlflow.explain.memory import Kept
from rlflow.explain.transfers import least
from rlflow.given.backends import backend, settings
from rlflow.given.flags import Given
from rlflow.graph.model import RoleUse
from rlflow.placement import HALVES, Placement
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
    ranks, size = where.pools[pool], getattr(generator, "tensor_parallel", 1)
    order = getattr(generator, "rank_order", "inner") if 1 < size < ranks else "inner"
    order = "inner" if order == "auto" and pool in adjacent else order
    together = where.trainers.get(use.name) == pool and use.trained and given.options.weights != "gather" and ranks % size == 0
    return Matched(*least(_kept(use, given, where) if together else Kept(None), ranks, _matches(trainer), order))


def _kept(use: RoleUse, given: Given, where: Placement) -> Kept:
    try:
        return kept(use, given, where)
    except PlanError:  # of a folder that cannot be read, said where it is
        return Kept(None)


def _matches(trainer: object) -> bool:
    """It shards whole tensors, and is asked to do so as the sampler."""
    return getattr(trainer, "match_sampler", False) and getattr(trainer, "shard", "none") == "full"


def _settings(use: RoleUse, given: Given, half: str) -> object:
    module, name = backend(given.backend(use.name, half)), half.capitalize()
    return settings(module, name, use.name, given.role(use.name)) if hasattr(module, name) else None
