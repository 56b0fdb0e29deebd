"""Plan a run: where its roles run, and the steps of an iteration.

Planning starts nothing, loads no models and opens no data. It has two steps: ``place_roles`` comes before the
data is opened and ``make_plan`` after that, because whether held-out records can be scored depends on the
data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.graph.model import FRESH_OPTIMIZER, SIDES, Graph, Op, used_nodes
from rlflow.compiler.passes import plan
from rlflow.compiler.passes.share import share
from rlflow.compiler.placement import THREADS, Parallel, Placement, Pools, place
from rlflow.compiler.plan import Plan, Streaming
from rlflow.compiler.preview.explanation import here
from rlflow.compiler.preview.fits import (
    crowded,
    idle_ranks,
    overlap_problems,
    stream_problems,
    too_many_rows,
    unused_pools,
)
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import Program
from rlflow.config.flags import RunConfig, pool_flag_problems
from rlflow.config.inputs import within_memory
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_in
from rlflow.config.roles.bound import Roles, Sides, model_uses, needed_sides, usual
from rlflow.config.roles.following import follow_problems
from rlflow.config.roles.rewards import RewardNames
from rlflow.errors import PlanError, Problem
from rlflow.runs.held_out import evaluation_role
from rlflow.training.protocols import GivesChunks, ResetsOptimizer


def with_parallelism(placement: Placement | None, graph: Graph, roles: Roles) -> Placement | None:
    """Add the parallelism of each trainer and generator on its pool to the placement.

    Returns None for a run in one process. Raises PlanError if a role's parallelism doesn't fit its pool.
    """
    pools = placement.pools if placement is not None else {}
    sides: dict[tuple[str, str], Parallel] = {}
    problems: list[Problem] = []
    for name, role in roles.items():
        for half in SIDES:
            pool = (
                (placement.trainers if half == "trainer" else placement.generators).get(name)
                if placement is not None
                else None
            )
            if placement is None or pool is not None:
                can = role.half(half).can
                how = sides[name, half] = Parallel(can.tensor, can.collective)
                problems += _unfit(name, half, how, pool, pools)
    problems += _fixed_optimizers(graph, roles)
    PlanError.refuse(
        [
            *problems,
            *_lone_stages(graph, sides),
            *_lone_changes(graph, placement),
            *follow_problems(roles, placement),
        ]
    )
    return (
        replace(placement, parallel={key: how for key, how in sides.items() if how != Parallel()})
        if placement is not None
        else None
    )


def _unfit(
    role: str, half: str, how: Parallel, pool: str | None, pools: Mapping[str, int]
) -> Iterator[Problem]:
    ranks = pools[pool] if pool is not None else 1
    if ranks % how.tensor:
        where = (
            f"pool '{pool}' has {ranks} rank{'s' if ranks > 1 else ''}"
            if pool is not None
            else "a run in one process has one rank"
        )
        yield Problem(
            "tensor-parallel",
            f"the {half} of role '{role}' needs complete groups of {how.tensor} ranks",
            found=where,
            expected=f"a multiple of {how.tensor}",
            remedy=f"--pools {pool or 'all'}={-(-ranks // how.tensor) * how.tensor}, "
            f"or --{role}.tensor_parallel 1",
        )


def _lone_stages(graph: Graph, sides: Mapping[tuple[str, str], Parallel]) -> Iterator[Problem]:
    """Yield a problem for each stage that runs a model on rank 0 alone if that rank lacks some weights."""
    for node in used_nodes(graph):
        if (
            node.op is Op.STAGE
            and node.role
            and node.dispatch == "RANK0"
            and sides.get((node.role, "trainer"), Parallel()).collective
        ):
            yield Problem(
                "lone-stage",
                f"{node.name} computes with '{node.role}' on rank 0 alone, which has only a part of its "
                "weights",
                node.place,
                found="dispatch=RANK0",
                expected="dispatch=DP_COMPUTE or dispatch=ALL, in which all ranks take part",
                remedy="write dispatch=ALL or DP_COMPUTE, or use a trainer that holds all weights on each "
                "rank",
            )


def _fixed_optimizers(graph: Graph, roles: Roles) -> Iterator[Problem]:
    """Yield a problem for each update whose optimizer must be reset, but whose trainer can't do that."""
    for node in used_nodes(graph):
        resets = any(item.parameter == FRESH_OPTIMIZER for item in node.inputs)
        if resets and not roles[str(node.role)].trainer.offers(ResetsOptimizer):
            backend = roles[str(node.role)].trainer.backend
            yield Problem(
                "optimizer-reset",
                f"{node.name} has fresh_optimizer=, but the trainer {backend} cannot reset its optimizer",
                node.place,
                found=f"--{node.role}.trainer {backend}",
                expected="a trainer with the method reset_optimizer",
                remedy=f"--{node.role}.trainer local, or remove fresh_optimizer=",
            )


def _lone_changes(graph: Graph, placement: Placement | None) -> Iterator[Problem]:
    """Yield a problem for each stage that could leave a role with different weights on different ranks.

    Such a stage may change the weights on one rank only, or use different rows on each rank.
    """
    for node in used_nodes(graph):
        pool = (
            placement.trainers.get(node.role or "")
            if placement is not None and node.op is Op.STAGE and not node.pure
            else None
        )
        if (
            placement is not None
            and pool is not None
            and placement.pools[pool] > 1
            and node.dispatch != "ALL"
        ):
            yield Problem(
                "lone-change",
                f"{node.name} may change the weights of '{node.role}' differently on the "
                f"{placement.pools[pool]} ranks of pool '{pool}'",
                node.place,
                found=f"dispatch={node.dispatch}, pure=False",
                expected="dispatch=ALL: each rank does the same",
                remedy=f"write dispatch=ALL, or --pools {pool}=1",
            )


def streaming(graph: Graph, roles: Roles, rewards: RewardNames, options: Options) -> Streaming:
    """Return what ``--stream`` may stream in this run.

    Reward functions may be streamed because they score each row by itself. A reward model may be streamed if
    its backend scores a row the same alone as in a batch. ``roles``: the roles that are models.
    """
    if options.stream < 2:
        return Streaming()
    samplers = {name for name, role in roles.items() if role.generator.offers(GivesChunks)}
    exact = {name for name, role in roles.items() if role.trainer.can.row_exact}
    scorers = {
        use.name
        for use in graph.roles
        if use.rewards
        and use.name not in roles
        and (rewards.functions_only(use.name) or usual(options.backend, "trainer").row_exact)
    }
    return Streaming(options.stream, frozenset(samplers), frozenset(exact | scorers))


@dataclass(frozen=True)
class PlacedRoles:
    """A run's models and rewards, and the pools they run on."""

    roles: Roles
    rewards: RewardNames
    options: Options
    placement: Placement | None  # None for a run in one process
    evaluated: str | None = None  # the role that answers held-out prompts, if any
    # the error if only the evaluation needs this role's generator and no flag gives it a pool
    undecided: PlanError | None = None

    @cached_property
    def needs(self) -> dict[str, Sides]:
        """For each role, whether it needs a trainer and whether it needs a generator.

        The evaluated role needs a generator even if the flow never samples.
        """
        return needed(self.roles, self.evaluated)

    @property
    def where(self) -> Placement:
        """The placement. If the run has only one process, everything is placed there."""
        return self.placement or here(self.needs)


def needed(roles: Roles, evaluated: str | None) -> dict[str, Sides]:
    """Return, for each role, whether it needs a trainer and whether it needs a generator.

    ``evaluated``: the role that answers held-out prompts, or None.
    """
    return {
        name: Sides(role.needs.trainer, role.needs.generator or name == evaluated)
        for name, role in roles.items()
    }


def place_roles(
    program: Program, roles: Roles, config: RunConfig, problems: Iterable[Problem] = ()
) -> PlacedRoles:
    """Place a run's models and rewards on the pools given with ``--pools``.

    Raises PlanError with ``problems`` and any other reasons to refuse the run that are known without data:
    row counts, rewards, pools, parallelism, staleness and so on.
    """
    options, rewards = config.options, RewardNames.of(config, program.flow)
    stale = [problem for problem in stale_problems(program, options.staleness) if problem.severity == "error"]
    problems = [
        *too_many_rows(Sizes.of(program.graph, Assumed(options.prompts))),
        *source_problems(options),
        *problems,
        *stale,
        *pool_flag_problems(roles, config),
    ]
    try:
        placed = _placed(program, roles, rewards, options)
    except PlanError as error:
        raise PlanError(*problems, *error.problems) from None
    PlanError.refuse([*problems, *overlap_problems(program.graph, placed.placement, options.staleness)])
    return placed


def problems_before_backends(
    graph: Graph, options: Options, values: Callable[[str], Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield the problems that can be found before a backend is loaded.

    These are too many rows, prompts drawn from several sources by weight, invalid pools, and a staleness that the
    pools don't allow. ``values``: returns a role's flags.
    """
    yield from too_many_rows(Sizes.of(graph, Assumed(options.prompts)))
    yield from source_problems(options)
    yield from pool_problems(options)
    placement = None
    if options.pools:
        uses = model_uses(graph)
        try:
            placement = place(
                graph,
                {use.name: needed_sides(graph, use) for use in uses},
                options.pools.ranks,
                {use.name: values(use.name) for use in uses},
            )
        except PlanError as error:
            yield from error.problems
            return
    yield from overlap_problems(graph, placement, options.staleness)


def _placed(program: Program, roles: Roles, rewards: RewardNames, options: Options) -> PlacedRoles:
    """Place a run's models and rewards on its pools.

    This includes the generator of a role that may be evaluated. If no flag gives this generator a pool, the
    error is stored as ``undecided``, because whether the role is evaluated depends on the data.
    """
    evaluated = evaluation_role(program.graph, roles, options)
    try:
        return PlacedRoles(
            roles, rewards, options, _placement(program, roles, options, needed(roles, evaluated)), evaluated
        )
    except PlanError as error:
        if evaluated is None or roles[evaluated].needs.generator:
            raise
        return PlacedRoles(
            roles,
            rewards,
            options,
            _placement(program, roles, options, needed(roles, None)),
            evaluated,
            error,
        )


def _placement(
    program: Program, roles: Roles, options: Options, needs: Mapping[str, Sides]
) -> Placement | None:
    flags: dict[str, Mapping[str, Any]] = {name: role.config.values for name, role in roles.items()}
    placement = None
    if options.pools:
        placement = replace(
            place(program.graph, needs, options.pools.ranks, flags),
            shares=options.pools.shares,
            threads=options.pools.threads,
        )
        PlanError.refuse([*thread_problems(placement, roles, options), *pool_problems(options)])
    return with_parallelism(placement, program.graph, roles)


def source_problems(options: Options) -> Iterator[Problem]:
    """Yield a problem if prompts would be drawn both by weight and in proportion to the shares of sources."""
    if options.prompts_by is not None and len(options.data) > 1:
        yield Problem(
            "prompts-by-sources",
            "--prompts-by draws from all records by weight, but several sources of data share the prompts",
            found=f"--prompts-by {options.prompts_by}, and {len(options.data)} times --data",
            expected="a single source",
            remedy="put all records into one file, or leave --prompts-by out",
            setting="prompts_by",
        )


def share_problems(pools: Pools, options: Options) -> Iterator[Problem]:
    """Yield a problem if ``--pools`` divides up GPUs but ranks compute on CPUs, or the other way around."""
    device = "gpu" if device_in(options.device) == "cuda" else "cpu"
    if pools.kind and device != pools.kind:
        yield Problem(
            "pool-device",
            f"--pools shares a {pools.kind} and the ranks compute on a {device}",
            found=f"--pools {pools}",
            expected=f"parts of a {device}, or --device {'cuda' if pools.kind == 'gpu' else 'cpu'}",
            remedy=f"--pools {pools.replace(f'@{pools.kind}', f'@{device}')}",
        )


def thread_problems(placement: Placement, roles: Roles, options: Options) -> Iterator[Problem]:
    """Yield a problem for each backend that needs a process per rank when ranks are threads."""
    if not placement.threads:
        return
    for half, pools in (("trainer", placement.trainers), ("generator", placement.generators)):
        for name in pools:
            bound = roles[name].half(half)
            if not bound.can.threads:
                yield Problem(
                    "pool-threads",
                    f"the {half} {bound.backend} of role '{name}' needs a process of its own for each rank",
                    found=f"--pools {options.pools}",
                    expected="a backend whose ranks may be threads: local, null",
                    remedy=_as_processes(options),
                )


def pool_problems(options: Options) -> Iterator[Problem]:
    """Yield the problems with pools that don't depend on backends.

    For example, a pool divides up CPUs or GPUs when the run uses only the other kind, or a flag doesn't work
    with ranks that are threads.
    """
    if options.pools:
        yield from share_problems(options.pools, options)
    if not options.pools or not options.pools.threads:
        return
    remedy = _as_processes(options)
    if options.weights not in ("auto", "gather"):
        yield Problem(
            "pool-threads",
            f"--weights {options.weights} moves weights between processes, but the ranks are threads of one",
            found=f"--pools {options.pools}",
            expected="--weights auto or gather",
            remedy=remedy,
        )
    if options.ray_address is not None:
        yield Problem(
            "pool-threads",
            "--ray-address joins a Ray cluster, but the ranks are threads of this process",
            found=f"--pools {options.pools} --ray-address {options.ray_address}",
            expected="only one of the two flags",
            remedy=remedy,
        )


def _as_processes(options: Options) -> str:
    return f"--pools {str(options.pools).replace(f'@{THREADS}', '')}, whose ranks are processes"


def settle_evaluation(placed: PlacedRoles, program: Program, evaluated: str | None) -> PlacedRoles:
    """Finish the placement now that the data is known.

    ``evaluated``: the role that is evaluated, or None, in which case a generator needed only for evaluation
    is removed. Raises PlanError if the evaluated role needs a pool and no flag names one.
    """
    if evaluated is not None:
        if placed.undecided is not None:
            raise placed.undecided
        return placed
    unneeded = placed.evaluated is not None and not placed.roles[placed.evaluated].needs.generator
    placement = placed.placement
    if placement is not None and unneeded and placed.undecided is None:
        generators = {role: pool for role, pool in placement.generators.items() if role != placed.evaluated}
        placement = with_parallelism(replace(placement, generators=generators), program.graph, placed.roles)
    return replace(placed, placement=placement, evaluated=None, undecided=None)


def make_plan(program: Program, placed: PlacedRoles) -> Plan:
    """Compile the program into a plan.

    Raises PlanError if ``--stream`` has no effect on this flow, or if there isn't enough memory.
    """
    options, chunks = placed.options, streaming(program.graph, placed.roles, placed.rewards, placed.options)
    packing = [name for name, role in placed.roles.items() if role.trainer.can.packs]
    passed = share(plan(program, placed.placement, chunks), packing)
    PlanError.refuse(stream_problems(passed, options.staleness))
    return within_memory(passed, placed.roles, placed.rewards, placed.where, options, placed.evaluated)


def pool_warnings(plan: Plan, sizes: Sizes) -> Iterator[Problem]:
    """Yield a warning for each pool and each rank that the plan leaves idle."""
    if plan.placement is not None:
        yield from unused_pools(plan.placement)
        yield from idle_ranks(plan, sizes)


def crowd_warnings(placed: PlacedRoles) -> Iterator[Problem]:
    """Yield a warning if this machine has fewer cores than the run has ranks."""
    if placed.placement is not None and placed.options.ray_address is None:
        yield from crowded(placed.placement, os.cpu_count() or 1)
