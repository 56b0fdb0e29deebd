"""A run on pools of Ray workers: what is made on the driver, and what is started."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import rlflow
from rlflow.binding.backends import numbers
from rlflow.binding.roles import Roles, model_uses
from rlflow.cluster import launch
from rlflow.cluster.commit import Workers
from rlflow.cluster.engine import ClusterEngine
from rlflow.cluster.fleet import Fleet
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.setup import DataShape, FlowSource, Setup
from rlflow.cluster.weights.models import RemoteModel, RemoteTrainer
from rlflow.cluster.weights.transfer import Carrier
from rlflow.cluster.worker import Worker
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options as RunOptions
from rlflow.data.prompts import Prompts
from rlflow.data.scorer import Judged
from rlflow.execution.lanes import Lanes
from rlflow.execution.lookahead import Ahead
from rlflow.graph.model import Graph
from rlflow.graph.wire import identity
from rlflow.memory.footprint import decided, kept
from rlflow.memory.schedule import MemorySchedule
from rlflow.passes.lanes import room_of
from rlflow.placement import Placement, judging
from rlflow.plan import Plan
from rlflow.runs.prepare import Runtime, make_plan, placed
from rlflow.trace.compile import Program, TraceOptions
from rlflow.watchdog.beside import Watchdog

GRACE = 5.0  # seconds after a deadline in which the engine names the ranks that have not answered


def on_pools(
    program: Program, roles: Roles, given: RunConfig, data: Judged, options: TraceOptions, prompts: Prompts, updates: Mapping[str, int],
    evaluated: str | None, watchdog: Watchdog, note: Callable[[str], None],
) -> Runtime:
    """Start the pools of ``--pools`` and load the models there, which takes some seconds, or minutes: ``note`` is told of it. Raises
    PlanError; what was started then is ended."""
    given = decided(given)
    lies, began = partial(_placed, program.graph, roles, given, evaluated), time.monotonic()
    with ExitStack() as started:
        folder = launch.run_folder(watchdog.name, given.options.ray_address)
        watchdog.remove_in_the_end(folder)
        groups, controllers = _room(room_for_commits(roles, given.options), given, lies(()), folder, started, watchdog, note)
        placement = lies(launch.apart(groups))
        made = make_plan(program, roles, placement, given, evaluated)
        threads = given.options.threads or max((os.cpu_count() or 1) // sum(placement.pools.values()), 1)
        meetings = launch.meetings(groups, folder)
        told = setups(program, given, data, options, placement, updates, threads, meetings, made.residency)
        fleet = Fleet(folder, told, groups, meetings, threads, given.options.heartbeat, given.options.load_timeout,
                      roles_of(placement), placement, lies, controllers)
        started.callback(fleet.stop)
        who = ", ".join(f"{len(told[pool])} on '{pool}' ({names or 'no model'})" for pool, names in fleet.roles.items())
        note(f"pools: Ray is there after {time.monotonic() - began:.1f} s; workers start and load: {who}")
        fleet.start()
        return _made(made, given, prompts, fleet, started)


def _room(
    memory: int, given: RunConfig, placement: Placement, folder: Path, started: ExitStack, watchdog: Watchdog, note: Callable[[str], None]
) -> tuple[launch.Groups, Controllers]:
    """Room for each pool, on a Ray that is started or joined. memory: bytes that its store needs for commits."""
    address = given.options.ray_address
    note(f"pools: {given.options.pools}: {f'joining the Ray at {address}' if address else 'starting a Ray of its own'}")
    with watchdog.marking():
        controllers = launch.start(address, sum(placement.pools.values()), folder, given.options.insecure, memory)
    started.callback(launch.leave, controllers)
    return launch.place_pools(placement.pools, given.options.device == "cuda"), controllers


def _made(plan: Plan, given: RunConfig, prompts: Prompts, fleet: Fleet, started: ExitStack) -> Runtime:
    """What a run needs of pools that are up."""
    engine = engine_of(plan, given, prompts, fleet.pools)
    lanes = Lanes(room_of(fleet.placement))
    started.callback(lanes.close)
    ahead = sampling_ahead(plan, engine, lanes, given, prompts)
    if ahead is not None:
        started.callback(ahead.close)
    started.callback(fleet.unwatch)  # first: lanes may be waiting for workers
    workers = Workers(fleet, engine, tuple(use.name for use in plan.graph.roles if use.trained), ahead)
    return Runtime(plan, engine, lanes, lambda: reasons(fleet.pools), started.pop_all().close, ahead, workers)


def _placed(graph: Graph, roles: Roles, given: RunConfig, evaluated: str | None, apart: Collection[str]) -> Placement:
    """apart: pools on several machines."""
    placement = placed(graph, roles, given, evaluated, apart)
    assert placement is not None
    return placement


def room_for_commits(roles: Roles, options: RunOptions) -> int:
    """Bytes that two commits take at most, the last one and the next, as far as models are known."""
    if not options.commit_every:
        return 0
    return 2 * sum(kept(role, options.dtype).commit_bytes or 0 for role in roles.values() if role.use.trained)


def sampling_ahead(made: Plan, engine: ClusterEngine, lanes: Lanes, given: RunConfig, prompts: Prompts) -> Ahead | None:
    """What samples ahead with ``--staleness`` above 0."""
    options = given.options
    return Ahead(made, engine, lanes, prompts, options.staleness, options.iterations, options.prompts) if options.staleness else None


def roles_of(placement: Placement) -> dict[str, str]:
    """The roles on each pool, in words."""
    found: dict[str, list[str]] = {pool: [] for pool in placement.pools}
    for role, pool in [*placement.trainers.items(), *placement.generators.items()]:
        found[pool] += [role] if role not in found[pool] else []
    return {pool: ", ".join(roles) for pool, roles in found.items()}


def setups(
    program: Program, given: RunConfig, data: Judged, options: TraceOptions, placement: Placement, updates: Mapping[str, int], threads: int,
    meetings: Mapping[str, str], residency: Iterable[MemorySchedule] = (),
) -> dict[str, list[Setup]]:
    """What each rank of each pool is told."""
    courses = {course.pool: course for course in residency}
    source, shape = FlowSource.of(program.flow), DataShape(data.columns, data.scorer)
    hp = {field.name: getattr(program.hp, field.name) for field in dataclasses.fields(program.hp)} if program.hp is not None else None
    return {
        pool: [
            Setup(rlflow.__version__, source, hp, given, options, identity(program.graph), shape, placement, pool, rank, ranks,
                  updates, threads, meetings[pool], courses.get(pool))
            for rank in range(ranks)
        ]
        for pool, ranks in placement.pools.items()
    }


def engine_of(
    made: Plan, given: RunConfig, prompts: Prompts, pools: Mapping[str, Pool[Worker]]
) -> ClusterEngine:
    program, graph, placement = made.program, made.graph, made.placement
    assert placement is not None
    models = {
        use.name: RemoteModel(
            use.name,
            RemoteTrainer(use.name, pools[placement.trainers[use.name]], placement.lies(use.name, "trainer").collective)
            if use.name in placement.trainers else None,
            pools.get(placement.generators.get(use.name, "")), carrier=carrier(use.name, given, placement, pools),
        )
        for use in model_uses(graph)
    }
    names = {id(function): name for name, function in program.functions.items()}
    return ClusterEngine(models, {}, given.options.seed, prompts.take, {slot.name: slot.initial for slot in graph.state},
                         reward_timeout=given.options.reward_timeout, dtype=numbers(given.options.dtype), grace=GRACE, pools=pools,
                         placement=placement, names=names,
                         judging=judging(graph, placement), limited=[course.pool for course in made.residency if course.moving])


def carrier(role: str, given: RunConfig, placement: Placement, pools: Mapping[str, Pool[Worker]]) -> Carrier | None:
    """What brings the weights of a role to another pool by a plan; None where they go otherwise, or nowhere."""
    source, target, options = placement.trainers.get(role), placement.generators.get(role), given.options
    if source is None or target is None or source == target or options.weights == "gather":
        return None
    return Carrier(role, pools[source], pools[target], options.weights, options.verify_every)


def reasons(pools: Mapping[str, Pool[Worker]]) -> dict[str, str]:
    """The first message of each cause for which scores are missing, from all ranks."""
    found: dict[str, str] = {}
    for pool in pools.values():
        for each in pool.call(Worker.reasons, seconds=60.0, group="control").result():
            found |= {cause: message for cause, message in each.items() if cause not in found}
    return found
