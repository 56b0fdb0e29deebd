"""Start a run on pools of Ray workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from rlflow.cluster import launch
from rlflow.cluster.forking import servers
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.run_workers import RunWorkers
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Plan
from rlflow.config.footprint import footprint
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_in
from rlflow.config.roles.bound import Roles
from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.runs.context import EngineInputs, Runtime
from rlflow.runs.planning import PlacedRoles
from rlflow.runs.pools import WorkerSetups, roles_of, runtime, threads_of_rank


def on_ray(
    plan: Plan,
    placed: PlacedRoles,
    setups: WorkerSetups,
    inputs: EngineInputs,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> Runtime:
    """Start the pools given with ``--pools`` on Ray, load the models there, and return the runtime.

    This takes seconds or minutes, so ``note`` is called with progress messages. If PlanError is raised,
    everything that was started has been stopped again.
    """
    options, began = placed.options, time.monotonic()
    with ExitStack() as started:
        folder = launch.run_folder(watchdog.name, options.ray_address)
        watchdog.remove_in_the_end(folder)
        threads = threads_of_rank(options, _on(placed))
        starting = WorkerStart(threads, _forking(placed, folder, threads))
        groups, controllers = _room(
            placed, plan.graph.changed_roles, folder, starting, started, watchdog, note
        )
        placement = _on(placed)
        rendezvous_points = launch.rendezvous_points(groups, folder)
        ranks = setups.of_pools(placement, threads, rendezvous_points, plan.residency)
        run_workers = RunWorkers(
            folder,
            ranks,
            groups,
            rendezvous_points,
            starting,
            options.heartbeat,
            options.load_timeout,
            roles_of(placement),
            controllers,
            options.wait_for_nodes,
        )
        started.callback(run_workers.stop)
        who = ", ".join(
            f"{len(ranks[pool])} on '{pool}' ({names or 'no model'})"
            for pool, names in run_workers.roles.items()
        )
        note(f"pools: Ray is ready after {time.monotonic() - began:.1f} s; workers start and load: {who}")
        run_workers.start()
        return runtime(plan, options, inputs, run_workers, run_workers.pools, started)


def _on(placed: PlacedRoles) -> Placement:
    assert placed.placement is not None  # the run uses pools
    return placed.placement


def _forking(placed: PlacedRoles, folder: Path, threads: int) -> str | None:
    """Start the fork server while Ray is starting, and return the command that forks workers from it.

    Returns None on accelerators: a forked process can't use an accelerator that its parent has already looked
    for.
    """
    if device_in(placed.options.device) != "cpu":
        return None
    private.share(folder)
    sides = {
        half.kind.__module__ for role in placed.roles.values() for half in role.sides if half.kind is not None
    }
    return servers.executable(
        folder,
        {"rlflow.execution.local_engine", *(name for name in sides if name.startswith("rlflow."))},
        threads,
    )


def _room(
    placed: PlacedRoles,
    changed: Collection[str],
    folder: Path,
    starting: WorkerStart,
    started: ExitStack,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> tuple[launch.Groups, Controllers]:
    """Start or join a Ray cluster, and reserve CPUs or GPUs for each pool's ranks.

    ``changed``: the roles whose state goes into in-memory checkpoints.
    """
    options = placed.options
    address = options.ray_address
    note(
        f"pools: {options.pools}: {f'joining the Ray at {address}' if address else 'starting a Ray for this run'}"
    )
    memory = room_for_commits(placed.roles, changed, options)
    with watchdog.marking():
        controllers = launch.start(
            address,
            _on(placed).processors(),
            folder,
            options.insecure,
            memory,
            starting,
            max(launch.REACH_SECONDS, options.wait_for_nodes),
        )
    started.callback(launch.leave, controllers)
    return launch.place_pools(
        _on(placed), device_in(options.device) == "cuda", options.wait_for_nodes
    ), controllers


def room_for_commits(roles: Roles, changed: Collection[str], options: Options) -> int:
    """Return how much memory in-memory checkpoints need, in bytes.

    There may be two at once, the last one and the next one. Models of unknown size aren't counted.
    ``changed``: the roles whose state goes into in-memory checkpoints.
    """
    if not options.copies_every:
        return 0
    return 2 * sum(
        footprint(role, options.dtype).commit_bytes or 0 for name, role in roles.items() if name in changed
    )
