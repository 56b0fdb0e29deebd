"""Ray's transport: a rank is an actor in a process of its own, and an answer an object of Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.cluster import group  # modules: Ray carries the actor's class over with all that it names
from rlflow.cluster.health import heartbeat as pulse
from rlflow.cluster.rpc import host
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.rank_transport import GROUPS, Answers, CallFailed, Gone
from rlflow.cluster.rpc.sockets import listen
from rlflow.processes import interfaces
from rlflow.processes.process import Process
from rlflow.processes.watchdog import beside, kin
from rlflow.processes.watchdog.stacks import show_stacks

W = TypeVar("W")
_actor: Any = ray.remote  # its own types know neither actors' concurrency groups nor restarts
SECONDS = 300.0  # how long Ray may take to give an answer that has come


@_actor(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class RayHost(host.Host):
    """A host in a process of its own. Ray never restarts it, which would lose the object's state silently."""

    watchdog: Any = None

    def make(self, kind: Callable[..., Any], *args: Any) -> None:
        """Make the object. This is not done in the constructor, since Ray does not hand on an error of that
        as it is."""
        kin.die_with_raylet()
        self.watchdog = beside.for_worker()
        super().make(kind, *args)

    def meet(self, name: str | None, insecure: bool) -> str:
        """Listen on the first rank of a pool on several machines. Gives the rendezvous address. Raises
        PlanError as ``interfaces.chosen`` does."""
        return group.listen(own_interface(name, insecure))

    def present(self) -> pulse.ProcessInfo:
        """The process of this worker, for the health monitor."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """A heartbeat: (activity, seconds) of each thread that is at work."""
        return pulse.MARKS.now()

    def listen(self, key: bytes) -> str:
        """Take frames over sockets too, from a process that has the key. Gives the socket's name."""
        return listen(key, self._run)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Contain what the call raises, and tell this process's watchdog that a call is under way."""
        with self.watchdog.board.during("", 0, math.inf), super()._contained():
            yield


class RayTransport:
    """Calls actors."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """A function that starts a method of a rank."""
        start: Callable[..., Any] = (
            getattr(rank, method).options(concurrency_group=group, num_returns=answers).remote
        )
        return start

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """The references whose answers have come, waited for."""
        found = ray.wait(list(refs), num_returns=1 if first else len(refs), timeout=seconds)
        return list(found[0])

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """The answers, once all have come. Raises CallFailed."""
        try:
            return list(ray.get(list(refs), timeout=seconds))
        except GetTimeoutError:
            return None
        except RayError as error:
            raise CallFailed from error

    def error(self, ref: Any) -> BaseException | None:
        """The error of an answer that has come."""
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
        """A reference of a value."""
        return ray.put(value)

    def future(self, ref: Any) -> Future[Any]:
        """A future that ends with the answer."""
        coming: Future[Any] = ref.future()
        return coming


def own_interface(name: str | None, insecure: bool) -> interfaces.Interface:
    """The network interface of this worker's machine: the one of this name, or else the one of the route to
    the cluster's first machine. Raises PlanError as ``interfaces.chosen`` does."""
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
    """Start a pool of actors: make ``kind(*arguments(rank))`` on each rank, in the bundles of a placement
    group. ``Pool.made`` waits for the objects.

    ``interface``: arguments of ``RayHost.meet``, which the first rank answers with its address; all ranks get
    that as a last argument."""
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
    # a reference, whose value Ray waits for and hands on
    rendezvous = (
        [] if interface is None else [actors[0].meet.options(concurrency_group="control").remote(*interface)]
    )
    pool.making = [
        actor.make.options(concurrency_group="model").remote(kind, *arguments(rank), *rendezvous)
        for rank, actor in enumerate(actors)
    ]
    return pool
