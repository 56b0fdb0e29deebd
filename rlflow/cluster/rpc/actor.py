"""Ray's transport: a rank is an actor in a process of its own, and an answer is an object of Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# modules, because Ray pickles the actor's class together with everything it names
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
_actor: Any = ray.remote  # its own types do not know concurrency groups and restarts of actors
SECONDS = 300.0  # time limit for Ray to deliver an answer that has arrived


@_actor(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class RayHost(host.Host):
    """A host in a process of its own.

    Ray never restarts it, because that would lose the object's state silently.
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
        """Listen on the first rank of a pool on several machines; return the rendezvous address.

        Raises PlanError like ``interfaces.chosen``.
        """
        return group.listen(own_interface(name, insecure))

    def present(self) -> pulse.ProcessInfo:
        """Return the process of this worker, for the health monitor."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """Answer a heartbeat: (activity, seconds) of each thread that has an activity."""
        return pulse.MARKS.now()

    def listen(self, key: bytes) -> str:
        """Accept frames over sockets from a process that has the key. Returns the socket's name."""
        return listen(key, self._run)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Contain exceptions of the call, and report to this process's watchdog that a call is running."""
        with self.watchdog.heartbeat_page.during("", 0, math.inf), super()._contained():
            yield


class RayTransport:
    """Calls actors of Ray."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts a method of a rank."""
        start: Callable[..., Any] = (
            getattr(rank, method).options(concurrency_group=group, num_returns=answers).remote
        )
        return start

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait for answers; return the references that have them."""
        found = ray.wait(list(refs), num_returns=1 if first else len(refs), timeout=seconds)
        return list(found[0])

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the answers once all have arrived; None after ``seconds``. Raises CallFailed."""
        try:
            return list(ray.get(list(refs), timeout=seconds))
        except GetTimeoutError:
            return None
        except RayError as error:
            raise CallFailed from error

    def error(self, ref: Any) -> BaseException | None:
        """Return the error of an answer that has arrived; None if it is a value."""
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
        """Return a future that ends with the answer."""
        coming: Future[Any] = ref.future()
        return coming


def own_interface(name: str | None, insecure: bool) -> interfaces.Interface:
    """Return the network interface of this worker's machine.

    It is the interface of this name, or else the one with the route to the cluster's first machine. Raises
    PlanError like ``interfaces.chosen``.
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

    Each rank makes ``kind(*arguments(rank))``. ``Pool.made`` waits for the objects. ``interface``: arguments
    of ``RayHost.meet`` on the first rank. It returns the rendezvous address, which all ranks get as an
    additional last argument.
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
    # a reference; Ray waits for its value and passes the value
    rendezvous = (
        [] if interface is None else [actors[0].meet.options(concurrency_group="control").remote(*interface)]
    )
    pool.making = [
        actor.make.options(concurrency_group="model").remote(kind, *arguments(rank), *rendezvous)
        for rank, actor in enumerate(actors)
    ]
    return pool
