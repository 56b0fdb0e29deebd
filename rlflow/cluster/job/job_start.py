"""Start and end the workers of a job, on the same kind of pools that runs use.

A JobMember is one rank, with an object of the user's class.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle
from ray.util.placement_group import PlacementGroup

from rlflow.author.batch import Batch
from rlflow.cluster import launch
from rlflow.cluster.forking import servers
from rlflow.cluster.group import LOOPBACK, join
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.health.monitor import HealthMonitor, Newcomers
from rlflow.cluster.job.here import Here, settle
from rlflow.cluster.job.rank_layout import Layout, check_room
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.rpc.actor import make_pool, own_interface
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.row_messages import RowMailbox, RowMessage
from rlflow.cluster.sharding.gather import owned
from rlflow.compiler.placement import GRAIN
from rlflow.errors import PlanError, RemoteError
from rlflow.extras import VERSION
from rlflow.monitoring.secrets import guard
from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.beside import Watchdog


@dataclass(frozen=True)
class Seat:
    """What a rank needs to set itself up."""

    version: str  # version of the driver's rlflow
    kind: bytes  # the pickled class
    arguments: Mapping[str, Any]  # arguments of the class, by name
    place: Here  # its ``meeting`` is only a name if ranks are on several machines
    distributed: bool  # whether the rank joins the role's torch group before the object is made
    device: str  # device of that group: cuda or cpu
    threads: int  # number of torch threads
    interface: str | None = None
    insecure: bool = False


class JobMember:
    """One rank of a job: an object of the user's class, and the calls to its methods.

    A rank runs its calls one at a time, in the order they were made.
    """

    def __init__(self, seat: Seat, address: str = "") -> None:
        """Create the object described by ``seat``. ``address``: rendezvous of ranks on several machines."""
        guard(sys.stdout, sys.stderr)  # Ray writes these streams to files
        if seat.version != VERSION:
            raise PlanError.of(
                "worker-version",
                "a rank has a different version of rlflow than the driver",
                found=VERSION,
                expected=seat.version,
                remedy="install the same version on every node",
            )
        torch.set_num_threads(seat.threads)
        place = replace(seat.place, meeting=address or seat.place.meeting)
        settle(place, seat.distributed)
        if seat.distributed:
            interface = own_interface(seat.interface, seat.insecure) if address else LOOPBACK
            join(place.meeting, place.rank, place.ranks, seat.device, interface)
        self.mailbox = RowMailbox()
        self.instance = cloudpickle.loads(seat.kind)(**seat.arguments)

    def invoke(self, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call a method of the rank's object, and return the result."""
        with MARKS.during(method):
            return getattr(self.instance, method)(*args, **keywords)

    def on_rows(
        self,
        method: str,
        row_message: RowMessage,
        shared: bool,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> RowMessage:
        """Call a method of the rank's object with its rows of a batch. Return the result as a message.

        ``shared``: whether the caller can read this process's shared memory. Raises TypeError if the method
        doesn't return a batch.
        """
        with MARKS.during(method):
            [batch] = self.mailbox.opened([row_message])
            answer = getattr(self.instance, method)(owned(batch), *args, **keywords)
        if not isinstance(answer, Batch):
            raise TypeError(
                f"'{method}' was called with rows and returned a {type(answer).__name__}, expected a Batch"
            )
        return self.mailbox.message(answer, shared=shared)

    def close(self) -> None:
        """Do nothing: processes started by the object end with this process anyway."""


# Modules that the fork server of the ranks imports. Ray is not among them, because Ray must read a rank's own
# environment at import.
IMPORTED = {"rlflow.execution.local_engine"}


@dataclass(frozen=True)
class JobOptions:
    """The settings of a job that all ranks share."""

    name: str
    address: str | None
    seconds: float  # time limit to make all objects
    heartbeat: float
    threads: int  # torch threads in each rank
    interface: str | None
    insecure: bool


@dataclass(frozen=True)
class RoleStart:
    """The class of a role, and the arguments and settings of its ranks."""

    kind: type
    arguments: Mapping[str, Any]
    env: Mapping[str, str]
    distributed: bool


@dataclass
class Started:
    """The workers of a running job."""

    options: JobOptions
    controllers: Controllers
    groups: dict[str, PlacementGroup] = field(default_factory=dict)  # role → its placement
    pools: dict[str, Pool[JobMember]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.monitor = HealthMonitor(self.options.heartbeat, self.controllers)

    def watch(self) -> None:
        """Wait until all objects have been created, then start checking the ranks' health.

        Raises PlanError if an object can't be created, and Dead if a rank has died.
        """
        wait_until_made(self.pools, self.options.seconds, self.controllers)
        self.monitor.start(self.pools, {})

    def end(self) -> None:
        """End all ranks. Calls still waiting for an answer raise Dead."""
        self.monitor.verdict = self.monitor.verdict or f"job '{self.options.name}' has ended"
        self.monitor.close()
        if not self.controllers.lost():
            launch.stop(self.pools, self.groups, self.monitor.watched)


def start(
    options: JobOptions, roles: Mapping[str, RoleStart], layouts: Sequence[Layout], over: ExitStack
) -> Started:
    """Start or join a Ray cluster, place the roles, and start their processes. Return the started job.

    The processes then create their objects on their own. ``over``: a stack that gets the callbacks for ending
    the processes and the Ray cluster. Raises PlanError if there's no room.
    """
    if options.address is None:
        check_room(layouts, [this_machine(layouts)])
    watchdog = Watchdog.start()
    over.callback(watchdog.close)
    folder = launch.run_folder(watchdog.name, options.address)
    watchdog.remove_in_the_end(folder)
    private.share(folder)
    python = (
        None
        if any(layout.bundle.gpus for layout in layouts)
        else servers.executable(folder, IMPORTED, options.threads)
    )
    starting = WorkerStart(options.threads, python, agents=any(role.env for role in roles.values()))
    with watchdog.marking():
        controllers = launch.start(
            options.address, _processors(layouts), folder, options.insecure, workers=starting
        )
    over.callback(launch.leave, controllers)
    check_room(layouts, [node["Resources"] for node in launch.ray_nodes() if node["Alive"]])
    started = Started(options, controllers)
    over.callback(started.end)
    _place(started.groups, layouts)
    needs = {name: need.resources() for layout in layouts for name, need in layout.needs.items()}
    points = launch.rendezvous_points(started.groups, folder)
    for name, role in roles.items():
        started.pools[name] = _pool(
            options, name, role, started.groups[name], points[name], needs[name], starting
        )
    return started


def _processors(layouts: Sequence[Layout]) -> int:
    return math.ceil(sum(layout.bundle.cpus * layout.ranks for layout in layouts) / GRAIN)


def this_machine(layouts: Sequence[Layout]) -> dict[str, float]:
    """Return the resources of a Ray cluster on this machine: all its GPUs, and as many CPUs as the job needs.

    That may be more CPUs than the machine has, because processes can share cores.
    """
    return {"CPU": max(_processors(layouts), os.cpu_count() or 1), "GPU": torch.cuda.device_count()}


# -- placement
# ------------------------------------------------------------------------------------------------------------


def _place(groups: dict[str, PlacementGroup], layouts: Sequence[Layout]) -> None:
    """Reserve a placement group for each layout, and store it in ``groups`` under each of the layout's roles.

    Raises PlanError if there's no room. ``groups`` then contains the placement groups reserved so far.
    """
    for layout in layouts:
        labels = _nodes_for(layout)
        group = launch.reserve(
            [layout.bundle.resources() for _ in range(layout.ranks)],
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": node} for node in labels] or None,
        )
        groups |= dict.fromkeys(layout.needs, group)
    launch.wait_for_room(groups)


def _nodes_for(layout: Layout) -> list[str]:
    """Return the node of each bundle in a layout, or an empty list if ``per_node`` isn't set.

    Each block of ``per_node`` bundles needs a node of its own. To find such nodes, this asks Ray to place
    bundles as large as a block. The ranks themselves get single bundles, so that ranks sharing a GPU get the
    same one.
    """
    blocks = layout.blocks()
    if not blocks:
        return []
    cpus, gpus = layout.bundle
    whole = [
        {name: parts * block / GRAIN for name, parts in (("CPU", cpus), ("GPU", gpus)) if parts}
        for block in blocks
    ]
    scout = launch.reserve(whole, strategy="STRICT_SPREAD")
    try:
        launch.wait_for_room({", ".join(layout.needs): scout})
        nodes = launch.nodes_of(scout)
    finally:
        launch.release(scout)
    return [nodes[number] for number, block in enumerate(blocks) for _ in range(block)]


def _pool(
    options: JobOptions,
    name: str,
    role: RoleStart,
    group: PlacementGroup,
    point: str,
    need: Mapping[str, float],
    starting: WorkerStart,
) -> Pool[JobMember]:
    """Start a role's processes, and return their pool."""
    ranks = group.bundle_count
    nodes = launch.nodes_of(group)
    places = seated(
        Here(options.name, name, 0, ranks, 0, 0, 0, 0, point if role.distributed else ""),
        [nodes[rank] for rank in range(ranks)],
    )
    device = "cuda" if need.get("GPU") else "cpu"
    kind = by_value(role.kind)
    seats = [
        Seat(
            VERSION,
            kind,
            role.arguments,
            place,
            role.distributed,
            device,
            options.threads,
            options.interface,
            options.insecure,
        )
        for place in places
    ]
    meet = (options.interface, options.insecure) if role.distributed and not point.startswith("/") else None
    gpus = {"num_gpus": need["GPU"]} if need.get("GPU") else {}
    return make_pool(
        name,
        JobMember,
        ranks,
        partial(_seat, seats),
        group,
        meet,
        num_cpus=need.get("CPU", 0),
        **gpus,
        **launch.asked_of_ray(starting, role.env),
    )


def _seat(seats: Sequence[Seat], rank: int) -> tuple[Seat]:
    return (seats[rank],)


def seated(first: Here, nodes: Sequence[str]) -> list[Here]:
    """Return the place of each rank of a role.

    ``first``: a place with the job, role, number of ranks and meeting point that all ranks share. ``nodes``:
    each rank's node.
    """
    order = list(dict.fromkeys(nodes))
    return [
        Here(
            first.job,
            first.role,
            rank,
            first.ranks,
            nodes[:rank].count(node),
            nodes.count(node),
            order.index(node),
            len(order),
            first.meeting,
        )
        for rank, node in enumerate(nodes)
    ]


def by_value(kind: type) -> bytes:
    """Pickle a class so that another process can load it without the module that defines it.

    Classes from installed packages are pickled by name, so for those, the other process needs the package.
    """
    module = sys.modules.get(kind.__module__)
    path = str(getattr(module, "__file__", None) or "")
    own = (
        module is not None
        and path
        and "site-packages" not in path
        and kind.__module__.partition(".")[0] != "rlflow"
    )
    if own and not path.startswith(str(Path(os.__file__).parent)):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    pickled: bytes = cloudpickle.dumps(kind)  # type: ignore[no-untyped-call]
    return pickled


def wait_until_made(pools: Mapping[str, Pool[JobMember]], seconds: float, controllers: Controllers) -> None:
    """Wait until the objects of all ranks have been created.

    Raises PlanError if Ray is lost or an object can't be created; the message then has the rank's error.
    """
    making = []
    for pool in pools.values():
        pool.watcher = Newcomers(pool, controllers)
        making.append(pool.made(seconds))
    try:
        for future in making:
            future.result()
    except RemoteError as error:
        launch.refuse_lost(controllers)
        raise PlanError.of(
            "job-start",
            "an object of a role could not be made",
            found=str(error),
            expected=f"all objects made within {seconds:g} s",
            remedy="set a longer limit with Job(seconds=…)",
        ) from error
