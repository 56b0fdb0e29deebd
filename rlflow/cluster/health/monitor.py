"""The health monitor: finds dead, stopped and hanging workers, reports the cause, and kills their pool.

Each worker answers heartbeats in a thread of its own, so it answers even while its other threads compute or
run Python code. There's no answer if the process is dead or stopped, or if C code holds the interpreter's
lock. Slow stages aren't the monitor's concern, because stages have their own deadlines.
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
from rlflow.cluster.health.postmortem import GONE_SECONDS, ProcessState, kill, look, wait_or_kill
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.sharding.shard_map import WorkerId
from rlflow.errors import Dead

PRESENT_SECONDS = 60.0  # time limit for a worker to describe its process
CAUSE_SECONDS = 5.0  # how long a failed call waits until every worker was checked
NODE_SECONDS = 15.0  # time limit for another node to examine or kill a process there
SHOWN = 2  # maximum number of late ranks whose stacks are shown
_task: Any = ray.remote


@dataclass
class WatchedWorker:
    """A worker checked by the monitor."""

    at: WorkerId
    actor: Any
    presence: ProcessInfo
    roles: str = ""  # roles on its pool, for messages
    doing: tuple[tuple[str, float], ...] = ()  # (activity, seconds) at its last heartbeat
    silent: float = 0.0  # seconds since the unanswered heartbeat was requested
    ref: Any = None  # reference of the unanswered heartbeat

    def __str__(self) -> str:
        process = self.presence.process
        about = f"pid {process.pid} on {process.host}, node {self.presence.node[:8]}" + (
            f", {self.roles}" if self.roles else ""
        )
        return f"{self.at} ({about})"

    def last_activity(self) -> str:
        """Describe the activities reported in the worker's last heartbeat."""
        ran = ", ".join(f"{what} for {seconds:.0f} s" for what, seconds in self.doing)
        return f"at its last heartbeat it ran {ran or 'nothing'}"


@dataclass(frozen=True)
class Death:
    """The death of a worker, and the findings of the postmortem."""

    worker: WatchedWorker
    how: str  # how the worker died or why it was killed, in words
    pool_ended: bool  # whether all processes of the worker's pool have ended

    @property
    def pool(self) -> str:
        """Name of the worker's pool."""
        return self.worker.at.pool

    def __str__(self) -> str:
        return f"{self.worker} {self.how}; {self.worker.last_activity()}"


@dataclass(frozen=True)
class Newcomers:
    """Watches workers while they load their models.

    No worker is killed, because a worker may not answer for a long time while it loads. This only describes
    what late workers are doing, and notices if Ray is lost.
    """

    pool: Pool[Any]
    controllers: Controllers = field(default_factory=Controllers)

    @property
    def verdict(self) -> str | None:
        """Description of a controlling process of Ray that has died, or None if all are alive."""
        return self.controllers.lost()

    def cause(self) -> None:
        """Always return None: while models are loading, no death of a worker is known."""
        return

    def late(self, at: Iterable[WorkerId]) -> str:
        """Describe what these workers are doing while they load."""
        return "".join(map(self._described, list(at)[:SHOWN]))

    def _described(self, at: WorkerId) -> str:
        try:
            return f"; {at} is still loading{_under(_there(_present(at, _identity(self.pool.actors[at.rank])), look))}"
        except Dead as error:
            return f"; {error}"


@dataclass
class HealthMonitor:
    """A thread that requests heartbeats from every worker.

    When a worker dies, the monitor kills the worker's pool, sets ``death`` and ``verdict``, and ends. If
    Ray's raylet is lost, it sets only ``verdict``, because no worker can be restarted.
    """

    limit: float  # seconds without a heartbeat after which a worker is killed, or 0 for never
    controllers: Controllers = field(default_factory=Controllers)
    watched: list[WatchedWorker] = field(default_factory=list)
    verdict: str | None = None  # why the run's workers ended, in words
    death: Death | None = None

    def __post_init__(self) -> None:
        self.tick = min(self.limit / 10, 1.0) if self.limit else 1.0
        self._lock, self._changed, self._hurry = threading.Lock(), threading.Condition(), threading.Event()
        self._round, self._complete, self._over = 0, 0, False
        self._thread: threading.Thread | None = None

    def start(self, pools: Mapping[str, Pool[Any]], roles: Mapping[str, str]) -> None:
        """Ask every worker about its process, and start checking the workers.

        ``roles``: pool → its roles, for messages. Raises Dead if a worker doesn't answer.
        """
        identities = [
            (pool.at(rank), actor, _identity(actor))
            for pool in pools.values()
            for rank, actor in enumerate(pool.actors)
        ]
        self.watched += [
            WatchedWorker(at, actor, _present(at, ref), roles.get(at.pool, ""))
            for at, actor, ref in identities
        ]
        for pool in pools.values():
            pool.watcher = self
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the monitor's thread. Calls still waiting for an answer raise Dead."""
        self.verdict = self.verdict or "the run has ended"
        self._over = True
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(2 * self.tick + GONE_SECONDS)

    # -- requests of calls that wait for an answer

    def found(self, seconds: float) -> Death | None:
        """Wait up to ``seconds`` for a worker to die. Return its death, or None if all workers are alive."""
        limit = time.monotonic() + seconds
        while self.cause() is None and time.monotonic() < limit:
            pass
        return self.death

    def cause(self) -> str | None:
        """Check every worker now. Describe why workers ended, or return None if all are alive."""
        with self._changed:
            after = self._round + 1  # the next round, which starts after this call
            self._hurry.set()
            self._changed.wait_for(lambda: self.verdict is not None or self._complete >= after, CAUSE_SECONDS)
        return self.verdict

    def late(self, at: Iterable[WorkerId]) -> str:
        """Describe what these late workers are doing, with their stacks."""
        late_workers = [worker for worker in self.watched if worker.at in set(at)][:SHOWN]
        return "".join(
            f"; {worker.at}: {worker.last_activity()}{_under(_there(worker.presence, look))}"
            for worker in late_workers
        )

    # -- the thread
    # --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            start = time.monotonic()
            self._hurry.clear()
            dead = self._beat()
            if (lost_controller := self.controllers.lost(RAYLET)) is not None:
                with self._changed:
                    self.verdict = lost_controller
                    self._changed.notify_all()
                return
            if dead is not None:
                self._end_pool(dead)
                return
            self._hurry.wait(max(start + self.tick - time.monotonic(), 0.0))
            self._count(time.monotonic() - start)

    def _beat(self) -> WatchedWorker | None:
        """Collect answers, and send the next heartbeat request to each worker that has answered its last one.

        Returns a worker that is dead or has been silent for too long, or None if there is none.
        """
        self._round += 1
        for worker in self.watched:
            if worker.ref is None:
                worker.ref = worker.actor.beat.options(concurrency_group="beat").remote()
        refs = [worker.ref for worker in self.watched]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=self.tick)
        for worker in (worker for worker in self.watched if worker.ref in answered):
            try:
                worker.doing, worker.silent, worker.ref = ray.get(worker.ref, timeout=self.tick), 0.0, None
            except RayError:
                return worker
        with self._changed:
            if len(answered) == len(refs):
                self._complete = self._round
            self._changed.notify_all()
        return next((worker for worker in self.watched if self.limit and worker.silent > self.limit), None)

    def _count(self, elapsed: float) -> None:
        """Add ``elapsed`` seconds to the silence of each worker that hasn't answered.

        At most two ticks are added. If more time has passed, this process itself was delayed.
        """
        for worker in self.watched:
            if worker.ref is not None:
                worker.silent += min(elapsed, 2 * self.tick)

    def _end_pool(self, worker: WatchedWorker) -> None:
        process_state, ended = None, False
        try:
            process_state = _there(worker.presence, look)
            # the other ranks may be waiting for the dead rank in a collective
            pool = [peer for peer in self.watched if peer.at.pool == worker.at.pool]
            ended = sum(end(peer.presence) or not _has_node(peer.presence.node) for peer in pool) == len(pool)
        finally:
            lives = isinstance(process_state, ProcessState) and process_state.state
            silence = (
                f", without an answer for {worker.silent:.0f} s"
                if lives and worker.silent > self.tick
                else ""
            )
            state = (
                f"{process_state}{silence}"
                if isinstance(process_state, ProcessState)
                else "has died, and its node does not answer"
            )
            remark = "" if ended else "; not all processes of its pool could be ended"
            with self._changed:
                self.death = Death(worker, state, ended)
                self.verdict = f"{self.death}{remark}{_under(process_state)}"
                self._changed.notify_all()


def _identity(actor: Any) -> Any:
    return actor.present.options(concurrency_group="beat").remote()


def _present(at: WorkerId, ref: Any) -> ProcessInfo:
    """Return information about a worker's process. Raises Dead if the worker doesn't answer.

    ``ref``: a reference to the answer.
    """
    try:
        presence: ProcessInfo = ray.get(ref, timeout=PRESENT_SECONDS)
    except RayError as error:
        raise Dead(f"{at} did not answer the startup handshake: {str(error).splitlines()[0]}") from None
    return presence


def _under(process_state: Any) -> str:
    return (
        f"\n{process_state.stacks}"
        if isinstance(process_state, ProcessState) and process_state.stacks
        else ""
    )


def _has_node(node: str) -> bool:
    """Whether Ray still lists this node as alive. If not, the node's processes have ended."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(entry["NodeID"] == node and entry["Alive"] for entry in nodes)


def end(presence: ProcessInfo, asked: bool = False) -> bool:
    """Kill a worker's process, on any machine, and return whether it has ended.

    ``asked``: whether Ray has already been asked to end the process, so that it gets some time to end by
    itself.
    """
    return bool(_there(presence, wait_or_kill if asked else kill))


def _there(presence: ProcessInfo, function: Callable[[ProcessInfo], Any]) -> Any:
    """Run one of the functions in ``postmortem`` on the machine of a worker's process, and return its result.

    Returns None if the machine doesn't answer.
    """
    if presence.process.alive() is not None:  # the process is on this machine
        return function(presence)
    affinity = NodeAffinitySchedulingStrategy(presence.node, soft=False)
    try:
        return ray.get(
            _postmortem.options(scheduling_strategy=affinity).remote(function, presence), timeout=NODE_SECONDS
        )
    except RayError:
        return None


def _call(function: Callable[[ProcessInfo], Any], presence: ProcessInfo) -> Any:
    return function(presence)


_postmortem: Any = _task(num_cpus=0, max_retries=0)(_call)
