"""Watching the workers of a run: who is dead, stopped or lets no thread run is found, named, killed and seen to be gone.

A worker answers ``beat`` from a thread that does nothing else. It answers while other threads compute or spin in Python; it does not
where the process is dead or stopped, or C code keeps the interpreter's lock. How long a stage may take is its own deadline's affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.cluster.health.controllers import RAYLET, Controllers
from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.health.postmortem import GONE_SECONDS, ProcessState, kill, look, see_off
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.sharding.shard_map import WorkerId
from rlflow.errors import Dead

PRESENT_SECONDS = 60.0  # how long a worker may take to say who it is
CAUSE_SECONDS = 5.0  # how long a failed call waits for a look at every worker
NODE_SECONDS = 15.0  # how long another node may take to look at a process there, or to kill it
SHOWN = 2  # of the ranks that are late, whose stacks are shown
_task: Any = ray.remote


@dataclass
class WatchedWorker:
    """One worker under watch. silent: seconds for which it has owed an answer. doing: what it last said it does, and for how long."""

    at: WorkerId
    actor: Any
    presence: ProcessInfo
    roles: str = ""
    doing: tuple[tuple[str, float], ...] = ()
    silent: float = 0.0
    ref: Any = None

    def __str__(self) -> str:
        process = self.presence.process
        about = f"pid {process.pid} on {process.host}, node {self.presence.node[:8]}" + (f", {self.roles}" if self.roles else "")
        return f"{self.at} ({about})"

    def under_way(self) -> str:
        ran = ", ".join(f"{what} for {seconds:.0f} s" for what, seconds in self.doing)
        return f"when last heard of it ran {ran or 'nothing'}"


@dataclass(frozen=True)
class Death:
    """What was found of a worker, in words, and whether no process of its pool is left."""

    ward: WatchedWorker
    how: str
    gone: bool

    @property
    def pool(self) -> str:
        return self.ward.at.pool

    def __str__(self) -> str:
        return f"{self.ward} {self.how}; {self.ward.under_way()}"


@dataclass(frozen=True)
class Newcomers:
    """Of workers that load their models, which may keep them from answering for long: nobody is killed, but where they are is told."""

    pool: Pool[Any]
    verdict: str | None = None

    def cause(self) -> None:
        return None

    def late(self, at: Iterable[WorkerId]) -> str:
        return "".join(map(self._told, list(at)[:SHOWN]))

    def _told(self, at: WorkerId) -> str:
        try:
            return f"; {at} still loads{_under(_there(_present(at, _asked_who(self.pool.actors[at.rank])), look))}"
        except Dead as error:
            return f"; {error}"


@dataclass
class Watch:
    """A thread that asks every worker for a beat, again and again. ``limit``: seconds of silence that end a worker, 0 for none: a death
    is noticed without. ``death`` and ``verdict`` are set once, after what they tell of is killed; nothing is watched from then on. With
    its raylet a Ray has lost all workers: that is a verdict without a death, since none can be started in their place."""

    limit: float
    controllers: Controllers = field(default_factory=Controllers)
    wards: list[WatchedWorker] = field(default_factory=list)
    verdict: str | None = None
    death: Death | None = None

    def __post_init__(self) -> None:
        self.tick = min(self.limit / 10, 1.0) if self.limit else 1.0
        self._lock, self._changed, self._hurry = threading.Lock(), threading.Condition(), threading.Event()
        self._round, self._complete, self._over = 0, 0, False
        self._thread: threading.Thread | None = None

    def start(self, pools: Mapping[str, Pool[Any]], roles: Mapping[str, str]) -> None:
        """Ask every worker who it is, and watch from now on. ``roles``: of each pool, for messages."""
        asked = [(pool.at(rank), actor, _asked_who(actor)) for pool in pools.values() for rank, actor in enumerate(pool.actors)]
        self.wards += [WatchedWorker(at, actor, _present(at, ref), roles.get(at.pool, "")) for at, actor, ref in asked]
        for pool in pools.values():
            pool.watcher = self
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; calls that still wait give up."""
        self.verdict = self.verdict or "the run has ended"
        self._over = True
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(2 * self.tick + GONE_SECONDS)

    # -- what those ask who wait for an answer -----------------------------------------------------------------------------------

    def found(self, seconds: float) -> Death | None:
        """Who died, once it is known; looked for as long as that."""
        limit = time.monotonic() + seconds
        while self.cause() is None and time.monotonic() < limit:
            pass
        return self.death

    def cause(self) -> str | None:
        with self._changed:
            after = self._round + 1  # one that begins from now on
            self._hurry.set()
            self._changed.wait_for(lambda: self.verdict is not None or self._complete >= after, CAUSE_SECONDS)
        return self.verdict

    def late(self, at: Iterable[WorkerId]) -> str:
        found = [ward for ward in self.wards if ward.at in set(at)][:SHOWN]
        return "".join(f"; {ward.at}: {ward.under_way()}{_under(_there(ward.presence, look))}" for ward in found)

    # -- the thread --------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            began = time.monotonic()
            self._hurry.clear()
            lost = self._beat()
            if (gone := self.controllers.lost(RAYLET)) is not None:
                with self._changed:
                    self.verdict = gone
                    self._changed.notify_all()
                return
            if lost is not None:
                self._judge(lost)
                return
            self._hurry.wait(max(began + self.tick - time.monotonic(), 0.0))
            self._count(time.monotonic() - began)

    def _beat(self) -> WatchedWorker | None:
        """Ask those who have answered the last time; who is gone."""
        self._round += 1
        for ward in self.wards:
            if ward.ref is None:
                ward.ref = ward.actor.beat.options(concurrency_group="beat").remote()
        refs = [ward.ref for ward in self.wards]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=self.tick)
        for ward in (ward for ward in self.wards if ward.ref in answered):
            try:
                ward.doing, ward.silent, ward.ref = ray.get(ward.ref, timeout=self.tick), 0.0, None
            except RayError:
                return ward
        with self._changed:
            if len(answered) == len(refs):
                self._complete = self._round
            self._changed.notify_all()
        return next((ward for ward in self.wards if self.limit and ward.silent > self.limit), None)

    def _count(self, passed: float) -> None:
        """More than two ticks at once are this process's own delay: nobody's silence."""
        for ward in self.wards:
            if ward.ref is not None:
                ward.silent += min(passed, 2 * self.tick)

    def _judge(self, ward: WatchedWorker) -> None:
        found, gone = None, False
        try:
            found = _there(ward.presence, look)
            pool = [other for other in self.wards if other.at.pool == ward.at.pool]  # they may wait for it in a collective
            gone = sum(end(other.presence) or not _stands(other.presence.node) for other in pool) == len(pool)
        finally:
            lives = isinstance(found, ProcessState) and found.state
            silence = f", without an answer for {ward.silent:.0f} s" if lives and ward.silent > self.tick else ""
            state = f"{found}{silence}" if isinstance(found, ProcessState) else "is gone, and its node does not answer"
            left = "" if gone else "; not all processes of its pool could be ended"
            with self._changed:
                self.death = Death(ward, state, gone)
                self.verdict = f"{self.death}{left}{_under(found)}"
                self._changed.notify_all()


def _asked_who(actor: Any) -> Any:
    return actor.present.options(concurrency_group="beat").remote()


def _present(at: WorkerId, ref: Any) -> ProcessInfo:
    """Who a worker is. Raises Dead for one that does not say it."""
    try:
        presence: ProcessInfo = ray.get(ref, timeout=PRESENT_SECONDS)
    except RayError as error:
        raise Dead(f"{at} does not say who it is: {str(error).splitlines()[0]}") from None
    return presence


def _under(found: Any) -> str:
    return f"\n{found.stacks}" if isinstance(found, ProcessState) and found.stacks else ""


def _stands(node: str) -> bool:
    """Whether Ray has this node still: with a node its processes go."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(each["NodeID"] == node and each["Alive"] for each in nodes)


def end(presence: ProcessInfo, asked: bool = False) -> bool:
    """Kill a worker's process, wherever it is; whether it is gone. It may be gone already, or, ``asked`` by Ray, be about to."""
    return bool(_there(presence, see_off if asked else kill))


def _there(presence: ProcessInfo, what: Callable[[ProcessInfo], Any]) -> Any:
    """A function of ``inquest`` on the worker's node; None where that does not answer."""
    if presence.process.alive() is not None:  # this machine
        return what(presence)
    where = NodeAffinitySchedulingStrategy(presence.node, soft=False)
    try:
        return ray.get(_inquest.options(scheduling_strategy=where).remote(what, presence), timeout=NODE_SECONDS)
    except RayError:
        return None


def _asked(what: Callable[[ProcessInfo], Any], presence: ProcessInfo) -> Any:
    return what(presence)


_inquest: Any = _task(num_cpus=0, max_retries=0)(_asked)
