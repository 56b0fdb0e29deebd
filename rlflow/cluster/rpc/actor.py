"""Ray's transport: a rank is an actor in its own process, and an answer is an object in Ray's store."""

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
    """A host in its own process.

    Ray never restarts it, because a restart would silently lose the object's state.
    """

    watchdog: Any = None

    def make(self, kind: Callable[..., Any], *args: Any) -> None:
        """Make the object.

        The constructor does not do this, because Ray does not report an error of a constructor unchanged.
        """
        process_tag.die_with_raylet()
        self.watchdog = beside.for_worker()
        super().make(kind, *args)

    def meet(self, name: str | None, insecure: bool) -> str:
        """Listen on the first rank of a pool on several machines, and return the rendezvous address.

        ``name``: network interface, or None. Raises PlanError like ``interfaces.chosen``.
        """
        return group.listen(own_interface(name, insecure))

    def present(self) -> pulse.ProcessInfo:
        """Return information about the process of this worker, for the health monitor."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """Answer a heartbeat with (activity, seconds) of each thread that has an activity."""
        return pulse.MARKS.now()

    def listen(self, key: bytes) -> str:
        """Accept frames over sockets from a process that has the key. Returns the name of the socket."""
        return listen(key, self._run)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Return a context that contains a call's exceptions, and reports the call to the watchdog."""
        with self.watchdog.heartbeat_page.during("", 0, math.inf), super()._contained():
            yield


class RayTransport:
    """Calls actors of Ray."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts a method of a rank. See ``RankTransport.starter``."""
        start: Callable[..., Any] = (
            getattr(rank, method).options(concurrency_group=group, num_returns=answers).remote
        )
        return start

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for answers; with ``first``, for one.

        Return the references that have answers.
        """
        found = ray.wait(list(refs), num_returns=1 if first else len(refs), timeout=seconds)
        return list(found[0])

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the answers when all have arrived; None after ``seconds``.

        Raises CallFailed for an error.
        """
        try:
            return list(ray.get(list(refs), timeout=seconds))
        except GetTimeoutError:
            return None
        except RayError as error:
            raise CallFailed from error

    def error(self, ref: Any) -> BaseException | None:
        """Return the error in an answer that has arrived; None if the answer is a value."""
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
        """Return a reference of a value."""
        return ray.put(value)

    def future(self, ref: Any) -> Future[Any]:
        """Return a future that ends when the answer arrives."""
        coming: Future[Any] = ref.future()
        return coming


def own_interface(name: str | None, insecure: bool) -> interfaces.Interface:
    """Return the network interface that this worker's machine uses.

    It is the interface called ``name``; if None, the one with the route to the cluster's first machine.
    Raises PlanError like ``interfaces.chosen``.
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
    """Start a pool of actors in the bundles of a placement group.

    Each rank makes the object ``kind(*arguments(rank))``. ``Pool.made`` waits for the objects. ``interface``:
    arguments with which ``RayHost.meet`` is called on the first rank; all ranks then get the rendezvous
    address as an additional last argument. ``options``: further options of the actors.
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
