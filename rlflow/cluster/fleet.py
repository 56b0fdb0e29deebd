"""All workers of a run: their pools, where these are placed, and who watches them. A pool whose workers are gone is started anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from rlflow.cluster import launch
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.monitor import Watch, WatchedWorker, end
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.setup import Setup
from rlflow.cluster.worker import Worker
from rlflow.placement import Placement
from rlflow.watchdog import private

BUSY_SECONDS = 30.0  # how long a pool may go on with what nobody waits for any more, before it is started anew as well
LATEST = 1 << 62  # no iteration is later


@dataclass
class Fleet:
    """folder: the run's, private. setups: what each rank is told, by pool. meetings: where the ranks of each pool meet.
    heartbeat: as of Watch. loading: seconds that models may take. roles: of each pool, for messages. placement: how halves lie on their
    pools; placed: the same where some are on several machines. A Pool stays the same object when its workers are others."""

    folder: Path
    setups: Mapping[str, list[Setup]]
    groups: Mapping[str, PlacementGroup]
    meetings: dict[str, str]
    threads: int
    heartbeat: float
    loading: float
    roles: Mapping[str, str]
    placement: Placement
    placed: Callable[[Collection[str]], Placement]
    controllers: Controllers = field(default_factory=Controllers)
    pools: dict[str, Pool[Worker]] = field(default_factory=dict)
    wards: list[WatchedWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = Watch(self.heartbeat, self.controllers)

    def start(self) -> None:
        """Start all pools, loaded side by side, and watch them. Raises PlanError with what keeps one from being made."""
        self.pools |= launch.make_workers(self.setups, self.groups, self.threads)
        launch.wait_for_models(self.pools.values(), self.loading)
        self._look_after()

    def restart(self, lost: str) -> list[str]:
        """Start a pool anew, and those that do not answer or do not come to rest; their names. The others forget what they held and
        what they were asked. Raises RemoteError for a worker that dies meanwhile, PlanError where a pool finds no room
        again or does not load."""
        names = [lost, *self._restless(name for name in self.pools if name != lost)]
        for name in names:
            self._end(name)
        launch.wait_for_room({name: self.groups[name] for name in names})
        self._forget_meetings(names)
        self.meetings |= launch.meetings({name: self.groups[name] for name in names}, self.folder)
        self.placement = self.placed(launch.apart(self.groups))
        told = {name: [replace(setup, meeting=self.meetings[name], placement=self.placement) for setup in self.setups[name]]
                for name in names}
        for name, made in launch.make_workers(told, self.groups, self.threads).items():
            self.pools[name].take_over(made)
        launch.wait_for_models((self.pools[name] for name in names), self.loading)
        self._look_after()
        for name, pool in self.pools.items():
            pool.call("clear", LATEST, group="control").result()
            if name not in names:
                pool.connect()  # it may be that nobody heard what was answered
        return names

    def unwatch(self) -> None:
        """Watch no more; calls that still wait give up."""
        self.watch.close()

    def stop(self) -> None:
        """End everything. What a Ray without its controllers does not end goes with the run's other processes."""
        try:
            if self.controllers.lost():
                for pool in self.pools.values():
                    pool.lines.close()
            else:
                launch.stop(self.pools, self.groups, self.wards)
        finally:
            self._forget_meetings(self.meetings)

    def _look_after(self) -> None:
        self.watch = Watch(self.heartbeat, self.controllers)
        self.watch.start(self.pools, self.roles)
        self.wards += self.watch.wards

    def _restless(self, names: Iterable[str]) -> list[str]:
        """Have pools begin a new era in which nothing counts that they were asked before; those in which a rank does not do so, since it
        is dead or still at work."""
        asked = {}
        for name in names:
            pool = self.pools[name]
            pool.era += 1
            asked[name] = [actor.enter.options(concurrency_group="model").remote(pool.era) for actor in pool.actors]
        refs = [ref for each in asked.values() for ref in each]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=BUSY_SECONDS)[0]) if refs else set()
        return [name for name, each in asked.items() if not ready.issuperset(each) or not all(map(_well, each))]

    def _end(self, name: str) -> None:
        """Kill what may be left of a pool."""
        for actor in self.pools[name].actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for ward in self.wards:
            if ward.at.pool == name:
                end(ward.presence)

    def _forget_meetings(self, names: Iterable[str]) -> None:
        """Remove the folders in which the ranks of pools on this machine met."""
        for name in names:
            if self.meetings[name].startswith("/"):
                private.remove(Path(self.meetings[name]).parent)


def _well(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except RayError:
        return False
    return True
