"""The workers of a run: their pools, their health monitor, and how dead pools are restarted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from rlflow.cluster import launch
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.monitor import Death, HealthMonitor, WatchedWorker, end
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.setup import Setup
from rlflow.cluster.worker import Worker
from rlflow.processes.watchdog import private

# seconds for which calls whose answers are no longer needed may keep a pool busy; after that, the pool is
# started again too
BUSY_SECONDS = 30.0
LATEST = 1 << 62  # larger than any iteration


@dataclass
class RunWorkers:
    """The workers of a run. Each Pool stays the same object even when its workers are replaced."""

    folder: Path  # the run's private folder
    setups: Mapping[str, list[Setup]]  # pool → setup of each rank
    groups: Mapping[str, PlacementGroup]  # pool → its placement in Ray
    rendezvous_points: dict[str, str]  # pool → rendezvous of its ranks
    starting: WorkerStart  # how Ray starts workers
    heartbeat: float  # seconds without a heartbeat after which a worker is killed, or 0 for never
    loading: float  # time limit to load models, in seconds
    roles: Mapping[str, str]  # pool → its roles, for messages
    controllers: Controllers = field(default_factory=Controllers)
    waiting: float = launch.PLACED_SECONDS  # time limit to place a pool in the cluster, in seconds
    pools: dict[str, Pool[Worker]] = field(default_factory=dict)
    watched: list[WatchedWorker] = field(default_factory=list)  # all workers that were ever started

    def __post_init__(self) -> None:
        self.watch = HealthMonitor(self.heartbeat, self.controllers)

    def start(self) -> None:
        """Start all pools in parallel, wait until their models are loaded, and start the health monitor.

        Raises PlanError if a pool can't be started.
        """
        self.pools |= launch.make_workers(self.setups, self.groups, self.starting)
        launch.wait_for_models(self.pools.values(), self.loading, self.controllers)
        self._watch()

    def restart(self, lost: str) -> list[str]:
        """Restart the pool ``lost`` and all pools that don't answer, and return their names.

        The workers of the other pools drop their columns and earlier calls. Raises RemoteError if a worker
        dies meanwhile, and PlanError if a pool can't be placed again or doesn't load its models.
        """
        names = [lost, *self._begin_generation(name for name in self.pools if name != lost)]
        for name in names:
            self._end(name)
        launch.wait_for_room({name: self.groups[name] for name in names}, self.waiting)
        self._remove_rendezvous_folders(names)
        self.rendezvous_points |= launch.rendezvous_points(
            {name: self.groups[name] for name in names}, self.folder
        )
        setups = {
            name: [replace(setup, rendezvous=self.rendezvous_points[name]) for setup in self.setups[name]]
            for name in names
        }
        for name, pool in launch.make_workers(setups, self.groups, self.starting).items():
            self.pools[name].take_over(pool)
        launch.wait_for_models((self.pools[name] for name in names), self.loading, self.controllers)
        self._watch()
        for name, pool in self.pools.items():
            pool.call("clear", LATEST, group="control").result()
            if name not in names:
                # replies to calls from the earlier generation may still arrive on the old connection
                pool.connect()
        return names

    def found(self, seconds: float) -> Death | None:
        """Wait up to ``seconds`` for a worker to die. Return its death, or None if all workers are alive."""
        return self.watch.found(seconds)

    def lost(self) -> str | None:
        """Describe a controlling process of Ray that has died, or return None if all are alive."""
        return self.controllers.lost()

    def unwatch(self) -> None:
        """Stop the health monitor. Calls still waiting for an answer raise Dead."""
        self.watch.close()

    def stop(self) -> None:
        """End all workers.

        If Ray has lost a controlling process, this only closes the sockets. The workers then end with the
        run's other processes.
        """
        try:
            if self.controllers.lost():
                for pool in self.pools.values():
                    pool.sockets.close()
            else:
                launch.stop(self.pools, self.groups, self.watched)
        finally:
            self._remove_rendezvous_folders(self.rendezvous_points)

    def _watch(self) -> None:
        self.watch = HealthMonitor(self.heartbeat, self.controllers)
        self.watch.start(self.pools, self.roles)
        self.watched += self.watch.watched

    def _begin_generation(self, names: Iterable[str]) -> list[str]:
        """Increase the generation number of pools, so that earlier calls to them become void.

        Returns the names of the pools that don't confirm the new number, because a rank is dead or still
        busy.
        """
        replies = {}
        for name in names:
            replies[name] = self.pools[name].enter(self.pools[name].generation + 1)
        refs = [ref for pool_replies in replies.values() for ref in pool_replies]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=BUSY_SECONDS)[0]) if refs else set()
        return [
            name
            for name, pool_replies in replies.items()
            if not ready.issuperset(pool_replies) or not all(map(_succeeded, pool_replies))
        ]

    def _end(self, name: str) -> None:
        """Kill all processes of a pool that are still running."""
        for actor in self.pools[name].actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for worker in self.watched:
            if worker.at.pool == name:
                end(worker.presence)

    def _remove_rendezvous_folders(self, names: Iterable[str]) -> None:
        """Remove the rendezvous folders of those pools that are on this machine."""
        for name in names:
            if self.rendezvous_points[name].startswith("/"):
                private.remove(Path(self.rendezvous_points[name]).parent)


def _succeeded(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except RayError:
        return False
    return True
