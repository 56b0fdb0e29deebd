"""Layouts of trainers and samplers that save bytes: what is decided of them before a run starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rlflow.compiler.placement import Placement
from rlflow.compiler.preview.transfers import least
from rlflow.compiler.sizes import ModelFootprint
from rlflow.config.footprint import footprint
from rlflow.config.options import Options
from rlflow.config.roles.roles import BoundRole
from rlflow.errors import PlanError


class Matched(NamedTuple):
    """Layouts of a role's two halves that go together, so that a transfer of weights moves fewer bytes."""

    dims: tuple[tuple[str, int], ...] = ()  # (tensor, dimension): the trainer shards it along the dimension that its generator cuts
    outer: bool = False  # whether ranks that share a replica of the generator are not adjacent


def choose_layouts(role: BoundRole, options: Options, placement: Placement | None, adjacent: Collection[str] = ()) -> Matched:
    """Choose, of the layouts that the backends of a role allow (``match_sampler``, ``rank_order``), those that save bytes. ``adjacent``:
    pools on which the ranks of a replica are adjacent unless a setting says otherwise."""
    pool = placement.generators.get(role.name) if placement is not None else None
    if placement is None or pool is None:
        return Matched()
    ranks, generator = placement.pools[pool], role.generator.can
    order = generator.rank_order if 1 < generator.tensor < ranks else "inner"
    order = "inner" if order == "auto" and pool in adjacent else order
    shared = placement.trainers.get(role.name) == pool and role.use.trained
    together = shared and options.weights != "gather" and ranks % generator.tensor == 0
    size = _footprint(role, options, placement) if together else ModelFootprint(None)
    return Matched(*least(size, ranks, role.trainer.can.matches_sampler, order))


def _footprint(role: BoundRole, options: Options, placement: Placement) -> ModelFootprint:
    try:
        return footprint(role, options.dtype, placement)
    except PlanError:  # a folder that cannot be read is reported where the model is loaded
        return ModelFootprint(None)
