"""A run on pools: the driver's part, and pools whose ranks are threads of the driver's process.

For pools on Ray, see `rlflow.runs.ray_pools`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlflow.author.figures import Cause
from rlflow.author.loss import Loss
from rlflow.author.node_options import FollowOptions
from rlflow.cluster.cluster_engine import ClusterEngine
from rlflow.cluster.commit import ProcessWorkers, Workers
from rlflow.cluster.in_threads import ThreadWorkers
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.setup import FlowSource, Setup
from rlflow.cluster.weights.endpoints import Following
from rlflow.cluster.weights.sharded_models import RemoteModel, RemoteTrainer
from rlflow.cluster.weights.transfer import WeightTransfer
from rlflow.cluster.worker import Worker
from rlflow.compiler.graph.model import Graph, RoleUse
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.passes.queues import room_of
from rlflow.compiler.placement import Placement, reward_pools
from rlflow.compiler.plan import Plan
from rlflow.compiler.residency_schedule import MemorySchedule
from rlflow.compiler.trace.compile import Program, TraceOptions
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_in, numbers
from rlflow.config.roles.bound import model_uses
from rlflow.data.scorer import DataShape, Judged
from rlflow.errors import Reason
from rlflow.execution.lookahead import Ahead
from rlflow.execution.memory.saved import empty
from rlflow.execution.queues import Queues
from rlflow.extras import VERSION
from rlflow.runs.context import EngineInputs, Runtime

GRACE = 5.0  # extra seconds, so that the engine can name the ranks that do not answer


@dataclass(frozen=True)
class WorkerSetups:
    """What is the same in the setup of all ranks' workers."""

    program: Program
    config: RunConfig
    data: Judged
    options: TraceOptions  # options that the program was traced with
    updates: Mapping[str, int]  # role → optimizer steps over the run

    def of_pools(
        self,
        placement: Placement,
        threads: int,
        rendezvous_points: Mapping[str, str],
        residency: Iterable[MemorySchedule] = (),
    ) -> dict[str, list[Setup]]:
        """Return the setups of each pool's ranks, by pool.

        ``threads``: PyTorch threads per rank. ``rendezvous_points``: the file or address where a pool's ranks
        meet. ``residency``: the pools' memory schedules.
        """
        program, schedules = self.program, {schedule.pool: schedule for schedule in residency}
        source, shape = (
            FlowSource.of(program.flow),
            DataShape(self.data.columns, self.data.scorer, self.data.sources),
        )
        hp = (
            {field.name: getattr(program.hp, field.name) for field in dataclasses.fields(program.hp)}
            if program.hp is not None
            else None
        )
        return {
            pool: [
                Setup(
                    version=VERSION,
                    flow=source,
                    hp=hp,
                    config=self.config,
                    options=self.options,
                    graph=identity(program.graph),
                    data=shape,
                    placement=placement,
                    pool=pool,
                    rank=rank,
                    ranks=ranks,
                    updates=self.updates,
                    threads=threads,
                    rendezvous=rendezvous_points[pool],
                    offload_plan=schedules.get(pool),
                )
                for rank in range(ranks)
            ]
            for pool, ranks in placement.pools.items()
        }


def worker_setups(
    program: Program, config: RunConfig, data: Judged, options: TraceOptions, updates: Mapping[str, int]
) -> WorkerSetups:
    """Return what is the same in the setup of all ranks' workers.

    The device ``auto`` is replaced with the driver's device, because workers may see different ones.
    """
    device: Any = device_in(config.options.device)
    return WorkerSetups(
        program, replace(config, options=replace(config.options, device=device)), data, options, updates
    )


def threads_of_rank(options: Options, placement: Placement) -> int:
    """Return how many PyTorch threads each rank gets."""
    return options.threads or max((os.cpu_count() or 1) // sum(placement.pools.values()), 1)


def in_threads(plan: Plan, options: Options, setups: WorkerSetups, inputs: EngineInputs) -> Runtime:
    """Load the models of pools whose ranks are threads of this process, and return the runtime.

    If PlanError is raised, everything that was started has been stopped again.
    """
    placement = plan.placement
    assert placement is not None
    with ExitStack() as started:
        threads = threads_of_rank(options, placement)
        there = setups.of_pools(placement, threads, dict.fromkeys(placement.pools, ""), plan.residency)
        run_workers = ThreadWorkers(plan.program.flow, there, options.load_timeout)
        started.callback(run_workers.stop)
        run_workers.start()
        return runtime(plan, options, inputs, run_workers, run_workers.pools, started)


def runtime(
    plan: Plan,
    options: Options,
    inputs: EngineInputs,
    run_workers: ProcessWorkers,
    pools: Mapping[str, Pool[Worker]],
    started: ExitStack,
) -> Runtime:
    """Return the runtime for pools that are already running.

    ``started``: an exit stack that stops everything started so far. The runtime takes it over and closes it
    in ``close``.
    """
    engine = engine_of(plan, options, inputs, pools)
    queues = Queues(room_of(plan.placement))
    started.callback(queues.close)
    ahead = None
    if options.staleness:
        ahead = Ahead(
            plan, engine, queues, inputs.prompts, options.staleness, options.iterations, options.prompts
        )
        started.callback(ahead.close)
    # called first at the end, because queues may be waiting for workers
    started.callback(run_workers.unwatch)
    workers = Workers(run_workers, engine, plan.graph.changed_roles, ahead)
    return Runtime(plan, engine, queues, lambda: reasons(pools), started.pop_all().close, ahead, workers)


def roles_of(placement: Placement) -> dict[str, str]:
    """Return the names of the roles on each pool, as text by pool."""
    names: dict[str, list[str]] = {pool: [] for pool in placement.pools}
    for role, pool in [*placement.trainers.items(), *placement.generators.items()]:
        names[pool] += [role] if role not in names[pool] else []
    return {pool: ", ".join(roles) for pool, roles in names.items()}


def engine_of(
    plan: Plan, options: Options, inputs: EngineInputs, pools: Mapping[str, Pool[Worker]]
) -> ClusterEngine:
    """Return the engine that executes a plan on pools that are already running."""
    program, graph, placement = plan.program, plan.graph, plan.placement
    assert placement is not None
    models = {
        use.name: RemoteModel(
            use.name,
            RemoteTrainer(
                use.name,
                pools[placement.trainers[use.name]],
                placement.parallelism(use.name, "trainer").collective,
            )
            if use.name in placement.trainers
            else None,
            pools.get(placement.generators.get(use.name, "")),
            transfer=transfer(use.name, options, placement, pools),
            following=following_transfer(graph, use, options, placement, pools),
        )
        for use in model_uses(graph)
    }
    names = {
        function.key if isinstance(function, Loss) else id(function): name
        for name, function in program.functions.items()
    }
    return ClusterEngine(
        models,
        {},
        options.seed,
        inputs.prompts.take,
        {slot.name: slot.initial for slot in graph.state},
        iterations=options.iterations,
        reward_timeout=options.reward_timeout,
        dtype=numbers(options.dtype),
        asking=inputs.asking,
        sampling=inputs.sampling,
        environments=inputs.environments,
        memory=empty(graph.memory, options.staleness, graph.nodes),
        draws=inputs.draws,
        grace=GRACE,
        pools=pools,
        placement=placement,
        names=names,
        judging=reward_pools(graph, placement),
        limited=[schedule.pool for schedule in plan.residency if schedule.moving],
    )


def transfer(
    role: str, options: Options, placement: Placement, pools: Mapping[str, Pool[Worker]]
) -> WeightTransfer | None:
    """Plan how a role's weights get to its generator's pool.

    Returns None if the trainer and the generator share a pool, if one of them is missing, or with ``--weights
    gather``.
    """
    source, target = placement.trainers.get(role), placement.generators.get(role)
    if source is None or target is None or source == target or options.weights == "gather":
        return None
    return WeightTransfer(role, pools[source], pools[target], options.weights, options.verify_every)


def following_transfer(
    graph: Graph, use: RoleUse, options: Options, placement: Placement, pools: Mapping[str, Pool[Worker]]
) -> WeightTransfer | None:
    """Plan how a role gets the weights of the role that it follows.

    Returns None if it follows none, if both trainers share a pool, or with ``--weights gather``.
    """
    options_of = [
        node.settings
        for node in graph.nodes
        if node.role == use.name and isinstance(node.settings, FollowOptions)
    ]
    if not options_of or options.weights == "gather":
        return None
    source, target = placement.trainers[options_of[0].follows], placement.trainers[use.name]
    if source == target:
        return None
    what = Following(use.name, options_of[0].follows, options_of[0].mix)
    return WeightTransfer(what, pools[source], pools[target], options.weights, options.verify_every)


def reasons(pools: Mapping[str, Pool[Worker]]) -> dict[Cause, Reason]:
    """Return the first reason for each cause of missing scores on any rank."""
    first: dict[Cause, Reason] = {}
    for pool in pools.values():
        for each in pool.call(Worker.reasons, seconds=60.0, group="control").result():
            first = each | first
    return first
