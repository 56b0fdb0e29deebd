"""Layouts of trainers and samplers that save bytes: what is decided of them before a run starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rlflow.binding.roles import BoundRole
from rlflow.config.options import Options
from rlflow.errors import PlanError
from rlflow.explain.transfers import least
from rlflow.memory.footprint import kept
from rlflow.memory.sizes import ModelFootprint
from rlflow.placement import Placement


class Matched(NamedTuple):
    """dims: the tensors that a role's trainer is to shard along the dimension that its sampler on the same ranks cuts, and which. outer:
    whether ranks that share a replica of the sampler are not adjacent."""

    dims: tuple[tuple[str, int], ...] = ()
    outer: bool = False


def matched(role: BoundRole, options: Options, where: Placement | None, adjacent: Collection[str] = ()) -> Matched:
    """What saves bytes, of what the backends do (``match_sampler``, ``rank_order``). adjacent: pools on which the ranks of a replica are
    adjacent where nobody says otherwise."""
    pool = where.generators.get(role.name) if where is not None else None
    if where is None or pool is None:
        return Matched()
    ranks, generator = where.pools[pool], role.generator.can
    order = generator.rank_order if 1 < generator.tensor < ranks else "inner"
    order = "inner" if order == "auto" and pool in adjacent else order
    shared = where.trainers.get(role.name) == pool and role.use.trained
    together = shared and options.weights != "gather" and ranks % generator.tensor == 0
    footprint = _kept(role, options, where) if together else ModelFootprint(None)
    return Matched(*least(footprint, ranks, role.trainer.can.matches_sampler, order))


def _kept(role: BoundRole, options: Options, where: Placement) -> ModelFootprint:
    try:
        return kept(role, options.dtype, where)
    except PlanError:  # of a folder that cannot be read, said where it is
        return ModelFootprint(None)
