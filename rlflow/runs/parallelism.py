"""How the halves of roles are distributed over the ranks of their pools: what their backends declare, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlflow.compiler.graph.model import HALVES, Graph, Op
from rlflow.compiler.placement import Parallel, Placement
from rlflow.compiler.trace.compile import used_nodes
from rlflow.config.roles.roles import Roles
from rlflow.errors import PlanError, Problem


def with_parallelism(placement: Placement | None, graph: Graph, roles: Roles) -> Placement | None:
    """Add to a placement how each half is distributed over its pool; None for one process. Raises PlanError where it does not fit."""
    pools = placement.pools if placement is not None else {}
    halves: dict[tuple[str, str], Parallel] = {}
    problems: list[Problem] = []
    for name, role in roles.items():
        for half in HALVES:
            pool = (placement.trainers if half == "trainer" else placement.generators).get(name) if placement is not None else None
            if placement is None or pool is not None:
                can = role.half(half).can
                how = halves[name, half] = Parallel(can.tensor, can.collective)
                problems += _unfit(name, half, how, pool, pools)
    PlanError.refuse([*problems, *_lone_stages(graph, halves), *_lone_changes(graph, placement)])
    return replace(placement, parallel={key: how for key, how in halves.items() if how != Parallel()}) if placement is not None else None


def _unfit(role: str, half: str, how: Parallel, pool: str | None, pools: Mapping[str, int]) -> Iterator[Problem]:
    ranks = pools[pool] if pool is not None else 1
    if ranks % how.tensor:
        where = f"pool '{pool}' has {ranks} rank{'s' if ranks > 1 else ''}" if pool is not None else "a run in one process has one rank"
        yield Problem("tensor-parallel", f"the {half} of role '{role}' wants whole teams of {how.tensor} ranks", found=where,
                      expected=f"a multiple of {how.tensor}", remedy=f"--pools {pool or 'all'}={-(-ranks // how.tensor) * how.tensor}, "
                      f"or --{role}.tensor_parallel 1")


def _lone_stages(graph: Graph, halves: Mapping[tuple[str, str], Parallel]) -> Iterator[Problem]:
    """Stages that compute with a model on rank 0 alone, of which it has a part."""
    for node in used_nodes(graph):
        if node.op is Op.STAGE and node.role and node.dispatch == "RANK0" and halves.get((node.role, "trainer"), Parallel()).collective:
            yield Problem("lone-stage", f"{node.name} computes with '{node.role}' on rank 0 alone, which holds a part of its weights",
                          node.place, found="dispatch=RANK0", expected="DP_COMPUTE or ALL, in which all ranks take part",
                          remedy="let the stage be ALL or DP_COMPUTE, or use a trainer that holds all weights on each rank")


def _lone_changes(graph: Graph, placement: Placement | None) -> Iterator[Problem]:
    """Stages that may change the weights of a role on one of several ranks, or on each by other rows: the ranks would then train and sample
    with weights that are not the same."""
    for node in used_nodes(graph):
        pool = placement.trainers.get(node.role or "") if placement is not None and node.op is Op.STAGE and not node.pure else None
        if placement is not None and pool is not None and placement.pools[pool] > 1 and node.dispatch != "ALL":
            yield Problem("lone-change", f"{node.name} may change the weights of '{node.role}', and not alike on the "
                          f"{placement.pools[pool]} ranks of pool '{pool}'", node.place, found=f"dispatch={node.dispatch}, pure=False",
                          expected="dispatch=ALL, with which each rank does the same", remedy=f"write dispatch=ALL, or --pools {pool}=1")
