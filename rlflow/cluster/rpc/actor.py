"""Ray's transport: each rank is an actor in its own process, and its answers are in Ray's store."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# imported as modules, because Ray pickles the actor's class together with everything that it names
from rlflow.cluster import group
from rlflow.cluster.health import heartbeat as pulse
from rlflow.cluster.rpc import host
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.rank_transport import GROUPS, Answers, CallFailed, Gone
from rlflow.cluster.rpc.sockets import listen
from rlflow.processes import interfaces
from rlflow.processes.process import Process
from rlflow.processes.watchdog import beside, process_tag
from rlflow.processes.watchdog.stacks import show_stacks

W = TypeVar("W")
_actor: Any = ray.remote  # Ray's types lack concurrency groups and restarts of actors
SECONDS = 300.0  # time limit for Ray to deliver an answer that has arrived


@_actor(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class RayHost(host.Host):
    """The host of a rank that is a Ray actor, in a process of its own.

    Ray never restarts the actor, because it would silently lose the object's state.
    """

    watchdog: Any = None

    def make(self, kind: Callable[..., Any], *args: Any) -> None:
        """Create the rank's object, ``kind(*args)``.

        The constructor doesn't do this, because Ray changes errors raised in constructors.
        """
        process_tag.die_with_raylet()
        self.watchdog = beside.for_worker()
        super().make(kind, *args)

    def meet(self, name: str | None, insecure: bool) -> str:
        """On the first rank of a pool on several machines, open the rendezvous, and return its address.

        ``name``: the network interface, or None to choose one. Raises PlanError in the same cases as
        ``interfaces.chosen``.
        """
        return group.listen(own_interface(name, insecure))

    def present(self) -> pulse.ProcessInfo:
        """Return information about this worker's process, for the health monitor."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """Answer a heartbeat. Return (activity, seconds) for each thread that has an activity."""
        return pulse.MARKS.now()

    def listen(self, key: bytes) -> str:
        """Accept frames over sockets from processes that have the key. Return the socket's name."""
        return listen(key, self._run)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Return a context manager for running a call: it handles exceptions and reports to the watchdog."""
        with self.watchdog.heartbeat_page.during("", 0, math.inf), super()._contained():
            yield


class RayTransport:
    """Calls ranks that are Ray actors."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts ``method`` on a rank. See ``RankTransport.starter``."""
        start: Callable[..., Any] = (
            getattr(rank, method).options(concurrency_group=group, num_returns=answers).remote
        )
        return start

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for all answers, or for just one if ``first`` is true.

        Returns the references whose answers have arrived.
        """
        found = ray.wait(list(refs), num_returns=1 if first else len(refs), timeout=seconds)
        return list(found[0])

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Wait for all answers and return them, or None if they don't arrive within ``seconds``.

        Raises CallFailed if an answer is an error.
        """
        try:
            return list(ray.get(list(refs), timeout=seconds))
        except GetTimeoutError:
            return None
        except RayError as error:
            raise CallFailed from error

    def error(self, ref: Any) -> BaseException | None:
        """Return the error that a call raised, or None if there was none. The answer must have arrived."""
        try:
            ray.get(ref, timeout=SECONDS)
        except RayTaskError as error:
            return error.cause or error
        except (RayActorError, GetTimeoutError) as error:
            return Gone(str(error))
        except RayError as error:
            return error
        return None

    def keep(self, value: Any) -> Any:
        """Put a value into Ray's store, and return a reference to it."""
        return ray.put(value)

    def future(self, ref: Any) -> Future[Any]:
        """Return a Future for the answer that ``ref`` refers to."""
        coming: Future[Any] = ref.future()
        return coming


def own_interface(name: str | None, insecure: bool) -> interfaces.Interface:
    """Return the network interface that this worker uses.

    ``name``: the interface's name, or None to use the one with the route to the cluster's first machine.
    Raises PlanError in the same cases as ``interfaces.chosen``.
    """
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    return interfaces.chosen(name, head, insecure)


def make_pool(
    name: str,
    kind: Callable[..., W],
    ranks: int,
    arguments: Callable[[int], tuple[Any, ...]],
    bundles: Any,
    interface: tuple[Any, ...] | None = None,
    **options: Any,
) -> Pool[W]:
    """Start a pool of actors in the bundles of a placement group, and return it.

    Each rank creates the object ``kind(*arguments(rank))``; ``Pool.made`` waits for that. ``interface``: if
    given, the first rank calls ``RayHost.meet`` with these arguments, and every rank gets the resulting
    rendezvous address as its last argument. ``options``: further options for Ray's actors.
    """
    made: Any = RayHost
    actors = []
    for rank in range(ranks):
        strategy = (
            PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
            if bundles is not None
            else "DEFAULT"
        )
        actors.append(made.options(scheduling_strategy=strategy, **options).remote())
    pool: Pool[W] = Pool(name, actors, RayTransport())
    # a reference; Ray waits for its value and passes the value on
    rendezvous = (
        [] if interface is None else [actors[0].meet.options(concurrency_group="control").remote(*interface)]
    )
    pool.making = [
        actor.make.options(concurrency_group="model").remote(kind, *arguments(rank), *rendezvous)
        for rank, actor in enumerate(actors)
    ]
    return pool
