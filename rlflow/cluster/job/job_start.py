"""Start and end the workers of a job, on pools of the same kind as in runs.

JobMember is one rank with an object of the user's class.
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
    """The data that a rank gets to set itself up."""

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
    """One rank of a job: an object of the user's class, and calls of the object's methods.

    The calls of a rank run one at a time, in the order in which they were made.
    """

    def __init__(self, seat: Seat, address: str = "") -> None:
        """Make the object that ``seat`` describes. ``address``: rendezvous of ranks on several machines."""
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
        """Call a method of the rank's object, and return its result."""
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
        """Call a method of the rank's object with the rank's rows of a batch. Return the result as a message.

        ``shared``: whether the caller can read this process's shared memory. Raises TypeError if the method
        does not return a batch.
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
        """Do nothing. Processes that the object has started end together with this process."""


# Modules that the fork server of the ranks imports. Ray is not among them, because Ray must read a rank's own
# environment at import.
IMPORTED = {"rlflow.execution.local_engine"}


@dataclass(frozen=True)
class JobOptions:
    """The settings of a job that are the same for all ranks."""

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
        """Wait until all objects are made, then start the health checks of the ranks.

        Raises PlanError if an object cannot be made, and Dead if a rank has died.
        """
        wait_until_made(self.pools, self.options.seconds, self.controllers)
        self.monitor.start(self.pools, {})

    def end(self) -> None:
        """End all ranks. Calls that are still waiting for an answer raise Dead."""
        self.monitor.verdict = self.monitor.verdict or f"job '{self.options.name}' has ended"
        self.monitor.close()
        if not self.controllers.lost():
            launch.stop(self.pools, self.groups, self.monitor.watched)


def start(
    options: JobOptions, roles: Mapping[str, RoleStart], layouts: Sequence[Layout], over: ExitStack
) -> Started:
    """Start or join a Ray cluster, place the roles, and start their processes. Return the started job.

    The processes make their objects after this. ``over``: a stack that gets the callbacks that end the
    processes and the Ray cluster. Raises PlanError if there is no room.
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
    """Return the resources for a Ray cluster on this machine: the machine's GPUs, and enough CPUs for the
    job.

    The number of CPUs may be larger than the machine's, because processes can share processor cores.
    """
    return {"CPU": max(_processors(layouts), os.cpu_count() or 1), "GPU": torch.cuda.device_count()}


# -- placement
# ------------------------------------------------------------------------------------------------------------


def _place(groups: dict[str, PlacementGroup], layouts: Sequence[Layout]) -> None:
    """Reserve a placement group for each layout, and store it in ``groups`` under each of its roles.

    Raises PlanError if there is no room. ``groups`` then has the placement groups that were already reserved.
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
    """Return the node for each bundle of a layout; an empty list if ``per_node`` is not set.

    Each block of ``per_node`` bundles needs its own node. To find the nodes, this function lets Ray place
    bundles as large as a block. The ranks themselves get single bundles, so that ranks sharing a GPU get the
    same GPU.
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
    """Start the processes of a role, and return their pool."""
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

    ``first``: the fields that all places have in common. ``nodes``: the node of each rank.
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
    """Return a pickle of a class that another process can load without the class's module.

    Classes of installed packages are pickled by name, so the other process needs the package.
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
    """Wait until the objects of all ranks are made.

    Raises PlanError if an object cannot be made, with the rank's error, or if Ray is lost.
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
