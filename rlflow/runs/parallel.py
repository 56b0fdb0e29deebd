"""How the halves of roles lie on the ranks of their pools: what their backends say, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlflow.errors import PlanError, Problem
from rlflow.given.backends import backend, settings
from rlflow.given.flags import Given
from rlflow.graph.model import Graph, Op, RoleUse
from rlflow.placement import HALVES, Parallel, Placement
from rlflow.runs.matching import matched
from rlflow.trace.compile import all_nodes


def lying(placement: Placement | None, graph: Graph, uses: list[RoleUse], given: Given) -> Placement | None:
    """The placement with what backends say of their halves; None for one process. Raises PlanError where it does not fit."""
    pools = placement.pools if placement is not None else {}
    found: dict[tuple[str, str], Parallel] = {}
    problems: list[Problem] = []
    for use in uses:
        for half in HALVES:
            pool = (placement.trainers if half == "trainer" else placement.generators).get(use.name) if placement is not None else None
            if placement is None or pool is not None:
                lies = found[use.name, half] = parallel(use, half, given, placement)
                problems += _unfit(use.name, half, lies, pool, pools)
    problems += _lone_stages(graph, found)
    if problems:
        raise PlanError(*problems)
    return replace(placement, parallel={key: lies for key, lies in found.items() if lies != Parallel()}) if placement is not None else None


def parallel(use: RoleUse, half: str, given: Given, where: Placement | None = None) -> Parallel:
    """What the backend of a role's half says of it, and what the other half has it do."""
    module, name = backend(given.backend(use.name, half)), half.capitalize()
    if not hasattr(module, name):  # said where settings are checked
        return Parallel()
    made = settings(module, name, use.name, given.role(use.name))
    return Parallel(getattr(made, "tensor_parallel", 1), bool(getattr(getattr(module, name), "collective", False)),
                    matched(use, given, where) if half == "trainer" else ())


def _unfit(role: str, half: str, lies: Parallel, pool: str | None, pools: Mapping[str, int]) -> Iterator[Problem]:
    ranks = pools[pool] if pool is not None else 1
    if ranks % lies.tensor:
        where = f"pool '{pool}' has {ranks} rank{'s' if ranks > 1 else ''}" if pool is not None else "a run in one process has one rank"
        yield Problem("tensor-parallel", f"the {half} of role '{role}' wants whole teams of {lies.tensor} ranks", found=where,
                      expected=f"a multiple of {lies.tensor}", remedy=f"--pools {pool or 'all'}={-(-ranks // lies.tensor) * lies.tensor}, "
                      f"or --{role}.tensor_parallel 1")


def _lone_stages(graph: Graph, found: Mapping[tuple[str, str], Parallel]) -> Iterator[Problem]:
    """Stages that compute with a model on rank 0 alone, of which it has a part."""
    for node in all_nodes(graph.nodes):
        if node.op is Op.STAGE and node.role and node.dispatch == "RANK0" and found.get((node.role, "trainer"), Parallel()).collective:
            yield Problem("lone-stage", f"{node.name} computes with '{node.role}' on rank 0 alone, which holds a part of its weights",
                          node.place, found="dispatch=RANK0", expected="DP_COMPUTE or ALL, in which all ranks take part",
                          remedy="let the stage be DP_COMPUTE, or use a trainer that holds all weights on each rank")
