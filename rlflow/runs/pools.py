"""A run on pools of Ray workers: what the driver makes, and what is started."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rlflow
from rlflow.author.loss import Loss
from rlflow.binding.backends import device_in, numbers
from rlflow.binding.roles import Roles, model_uses
from rlflow.cluster import launch
from rlflow.cluster.commit import Workers
from rlflow.cluster.engine import ClusterEngine
from rlflow.cluster.fleet import Fleet
from rlflow.cluster.forking import servers
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.setup import FlowSource, Setup
from rlflow.cluster.weights.models import RemoteModel, RemoteTrainer
from rlflow.cluster.weights.transfer import WeightTransfer
from rlflow.cluster.worker import Worker
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options
from rlflow.data.prompts import Prompts
from rlflow.data.scorer import DataShape, Judged
from rlflow.execution.lanes import Lanes
from rlflow.execution.lookahead import Ahead
from rlflow.graph.wire import identity
from rlflow.memory.footprint import footprint
from rlflow.memory.schedule import MemorySchedule
from rlflow.passes.lanes import room_of
from rlflow.placement import Placement, reward_pools
from rlflow.plan import Plan
from rlflow.runs.context import Runtime
from rlflow.runs.planning import PlacedRoles, make_plan, place_across_machines
from rlflow.trace.compile import Program, TraceOptions
from rlflow.watchdog import private
from rlflow.watchdog.beside import Watchdog

GRACE = 5.0  # seconds after a deadline in which the engine names the ranks that have not answered


@dataclass(frozen=True)
class WorkerSetups:
    """The part of a worker's setup that is the same on all ranks."""

    program: Program
    config: RunConfig
    data: Judged
    options: TraceOptions  # as the program was traced
    updates: Mapping[str, int]  # role → optimizer steps over the run

    def of_pools(
        self, placement: Placement, threads: int, rendezvous_points: Mapping[str, str], residency: Iterable[MemorySchedule] = ()
    ) -> dict[str, list[Setup]]:
        """The setup of each rank of each pool. ``rendezvous_points``: pool → where its ranks meet."""
        program, schedules = self.program, {schedule.pool: schedule for schedule in residency}
        source, shape = FlowSource.of(program.flow), DataShape(self.data.columns, self.data.scorer, self.data.sources)
        hp = {field.name: getattr(program.hp, field.name) for field in dataclasses.fields(program.hp)} if program.hp is not None else None
        return {
            pool: [
                Setup(rlflow.__version__, source, hp, self.config, self.options, identity(program.graph), shape, placement, pool, rank,
                      ranks, self.updates, threads, rendezvous_points[pool], schedules.get(pool))
                for rank in range(ranks)
            ]
            for pool, ranks in placement.pools.items()
        }


def worker_setups(program: Program, config: RunConfig, data: Judged, options: TraceOptions, updates: Mapping[str, int]) -> WorkerSetups:
    """Gather what workers need to know of a run, with the device that ``auto`` is here: workers may see other ones."""
    device: Any = device_in(config.options.device)
    return WorkerSetups(program, replace(config, options=replace(config.options, device=device)), data, options, updates)


def on_pools(
    plan: Plan, placed: PlacedRoles, setups: WorkerSetups, prompts: Prompts, watchdog: Watchdog, note: Callable[[str], None]
) -> Runtime:
    """Start the pools of ``--pools`` and load the models there, which takes some seconds, or minutes: ``note`` is told of it. Raises
    PlanError; whatever was started by then is ended."""
    options, began = placed.options, time.monotonic()
    with ExitStack() as started:
        folder = launch.run_folder(watchdog.name, options.ray_address)
        watchdog.remove_in_the_end(folder)
        threads = options.threads or max((os.cpu_count() or 1) // sum(_on(placed).pools.values()), 1)
        python = _forking(placed, folder, threads)
        groups, controllers = _room(placed, folder, started, watchdog, note)
        if spread := launch.apart(groups):
            plan = make_plan(plan.program, place_across_machines(placed, plan.program, spread))
        placement = plan.placement or _on(placed)
        rendezvous_points = launch.rendezvous_points(groups, folder)
        ranks = setups.of_pools(placement, threads, rendezvous_points, plan.residency)

        def placement_on(spread: Collection[str]) -> Placement:
            return _on(place_across_machines(placed, plan.program, spread))

        fleet = Fleet(folder, ranks, groups, rendezvous_points, threads, options.heartbeat, options.load_timeout,
                      roles_of(placement), placement, placement_on, controllers, options.wait_for_nodes, python)  # fmt: skip
        started.callback(fleet.stop)
        who = ", ".join(f"{len(ranks[pool])} on '{pool}' ({names or 'no model'})" for pool, names in fleet.roles.items())
        note(f"pools: Ray is there after {time.monotonic() - began:.1f} s; workers start and load: {who}")
        fleet.start()
        return _runtime(plan, options, prompts, fleet, started)


def _on(placed: PlacedRoles) -> Placement:
    assert placed.placement is not None  # there are pools
    return placed.placement


def _forking(placed: PlacedRoles, folder: Path, threads: int) -> str | None:
    """Begin to import what workers on this machine will import, while Ray starts. Gives the command that starts them; None for
    accelerators, which a fork of a process that has looked for them cannot use."""
    if device_in(placed.options.device) != "cpu":
        return None
    private.share(folder)
    halves = {half.kind.__module__ for role in placed.roles.values() for half in role.halves if half.kind is not None}
    return servers.executable(folder, {"rlflow.execution.engine", *(name for name in halves if name.startswith("rlflow."))}, threads)


def _room(
    placed: PlacedRoles, folder: Path, started: ExitStack, watchdog: Watchdog, note: Callable[[str], None]
) -> tuple[launch.Groups, Controllers]:
    """Reserve the ranks of each pool on a Ray that is started or joined."""
    options = placed.options
    address = options.ray_address
    note(f"pools: {options.pools}: {f'joining the Ray at {address}' if address else 'starting a Ray of its own'}")
    memory = room_for_commits(placed.roles, options)
    with watchdog.marking():
        controllers = launch.start(address, _on(placed).processors(), folder, options.insecure, memory)
    started.callback(launch.leave, controllers)
    return launch.place_pools(_on(placed), device_in(options.device) == "cuda", options.wait_for_nodes), controllers


def _runtime(plan: Plan, options: Options, prompts: Prompts, fleet: Fleet, started: ExitStack) -> Runtime:
    """Make what a run needs of pools that are up."""
    engine = engine_of(plan, options, prompts, fleet.pools)
    lanes = Lanes(room_of(fleet.placement))
    started.callback(lanes.close)
    ahead = Ahead(plan, engine, lanes, prompts, options.staleness, options.iterations, options.prompts) if options.staleness else None
    if ahead is not None:
        started.callback(ahead.close)
    started.callback(fleet.unwatch)  # first: lanes may be waiting for workers
    workers = Workers(fleet, engine, tuple(use.name for use in plan.graph.roles if use.trained), ahead)
    return Runtime(plan, engine, lanes, lambda: reasons(fleet.pools), started.pop_all().close, ahead, workers)


def room_for_commits(roles: Roles, options: Options) -> int:
    """Bytes that two commits take at most, the last one and the next, as far as models are known."""
    if not options.commit_every:
        return 0
    return 2 * sum(footprint(role, options.dtype).commit_bytes or 0 for role in roles.values() if role.use.trained)


def roles_of(placement: Placement) -> dict[str, str]:
    """Pool → the roles on it, in words."""
    names: dict[str, list[str]] = {pool: [] for pool in placement.pools}
    for role, pool in [*placement.trainers.items(), *placement.generators.items()]:
        names[pool] += [role] if role not in names[pool] else []
    return {pool: ", ".join(roles) for pool, roles in names.items()}


def engine_of(plan: Plan, options: Options, prompts: Prompts, pools: Mapping[str, Pool[Worker]]) -> ClusterEngine:
    """The engine that carries a plan out on pools that are up."""
    program, graph, placement = plan.program, plan.graph, plan.placement
    assert placement is not None
    models = {
        use.name: RemoteModel(
            use.name,
            RemoteTrainer(use.name, pools[placement.trainers[use.name]], placement.parallelism(use.name, "trainer").collective)
            if use.name in placement.trainers else None,
            pools.get(placement.generators.get(use.name, "")), transfer=transfer(use.name, options, placement, pools),
        )
        for use in model_uses(graph)
    }
    names = {function.key if isinstance(function, Loss) else id(function): name for name, function in program.functions.items()}
    return ClusterEngine(models, {}, options.seed, prompts.take, {slot.name: slot.initial for slot in graph.state},
                         reward_timeout=options.reward_timeout, dtype=numbers(options.dtype), grace=GRACE, pools=pools,
                         placement=placement, names=names,
                         judging=reward_pools(graph, placement),
                         limited=[schedule.pool for schedule in plan.residency if schedule.moving])


def transfer(role: str, options: Options, placement: Placement, pools: Mapping[str, Pool[Worker]]) -> WeightTransfer | None:
    """The transfer that brings the weights of a role to another pool by a plan; None where they go otherwise, or nowhere."""
    source, target = placement.trainers.get(role), placement.generators.get(role)
    if source is None or target is None or source == target or options.weights == "gather":
        return None
    return WeightTransfer(role, pools[source], pools[target], options.weights, options.verify_every)


def reasons(pools: Mapping[str, Pool[Worker]]) -> dict[str, str]:
    """The first message of each cause for which scores are missing, from all ranks."""
    messages: dict[str, str] = {}
    for pool in pools.values():
        for each in pool.call(Worker.reasons, seconds=60.0, group="control").result():
            messages |= {cause: message for cause, message in each.items() if cause not in messages}
    return messages
