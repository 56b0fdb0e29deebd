"""Starting the workers of a job on the pools that runs use, and ending them.

Here too: a member of a job, one rank around the object of the user's class.
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
from rlflow.cluster.rpc.parcels import Parcel, Post
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.sharding.gather import owned
from rlflow.compiler.placement import GRAIN
from rlflow.errors import PlanError, RemoteError
from rlflow.extras import VERSION
from rlflow.monitoring.secrets import guard
from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.beside import Watchdog


@dataclass(frozen=True)
class Seat:
    """The message with which a rank is set up."""

    version: str  # of the driver's rlflow
    kind: bytes  # the pickled class
    arguments: Mapping[str, Any]  # of the class, by name
    place: Here  # its meeting is a name alone where the ranks are on several machines
    distributed: bool  # whether the rank joins torch's group of the role before the object is made
    device: str  # of that group: cuda or cpu
    threads: int  # of torch
    interface: str | None = None
    insecure: bool = False


class JobMember:
    """Makes the user's object and calls its methods. Calls of one rank run one at a time, in the order in
    which they were made."""

    def __init__(self, seat: Seat, address: str = "") -> None:
        """``address``: where ranks on several machines meet."""
        guard(sys.stdout, sys.stderr)  # which Ray keeps in files
        if seat.version != VERSION:
            raise PlanError.of(
                "worker-version",
                "a rank has another rlflow than the driver",
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
        self.post = Post()
        self.instance = cloudpickle.loads(seat.kind)(**seat.arguments)

    def invoke(self, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call a method of the object."""
        with MARKS.during(method):
            return getattr(self.instance, method)(*args, **keywords)

    def on_rows(
        self, method: str, parcel: Parcel, shared: bool, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Parcel:
        """Call a method from batch to batch with some rows. ``shared``: whether whoever asks can read this
        process's shared memory. Raises TypeError where the method gives no batch."""
        with MARKS.during(method):
            [batch] = self.post.opened([parcel])
            answer = getattr(self.instance, method)(owned(batch), *args, **keywords)
        if not isinstance(answer, Batch):
            raise TypeError(
                f"'{method}' was called with rows and gave a {type(answer).__name__}, expected a Batch"
            )
        return self.post.parcel(answer, shared=shared)

    def close(self) -> None:
        """Nothing is left to end here: the processes that the object has started end with this one."""


# by the process of which ranks are forks: not Ray, which reads a rank's own environment as it comes
IMPORTED = {"rlflow.execution.engine"}


@dataclass(frozen=True)
class Terms:
    """Settings of a job that hold for all of its ranks."""

    name: str
    address: str | None
    seconds: float  # in which all objects have to be made
    heartbeat: float
    threads: int  # of torch, in each rank
    interface: str | None
    insecure: bool


@dataclass(frozen=True)
class RoleStart:
    """The class of a role, and what its ranks are made with."""

    kind: type
    arguments: Mapping[str, Any]
    env: Mapping[str, str]
    distributed: bool


@dataclass
class Started:
    """The workers of a job that runs."""

    terms: Terms
    controllers: Controllers
    groups: dict[str, PlacementGroup] = field(default_factory=dict)  # role → its placement
    pools: dict[str, Pool[JobMember]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.monitor = HealthMonitor(self.terms.heartbeat, self.controllers)

    def watch(self) -> None:
        """Wait until all objects are made, and watch the ranks from then on. Raises PlanError where one could
        not be made, Dead."""
        wait_until_made(self.pools, self.terms.seconds, self.controllers)
        self.monitor.start(self.pools, {})

    def end(self) -> None:
        """End all ranks. Calls that still wait raise Dead."""
        self.monitor.verdict = self.monitor.verdict or f"job '{self.terms.name}' has ended"
        self.monitor.close()
        if not self.controllers.lost():
            launch.stop(self.pools, self.groups, self.monitor.watched)


def start(
    terms: Terms, roles: Mapping[str, RoleStart], layouts: Sequence[Layout], over: ExitStack
) -> Started:
    """Start a Ray or join one, find room, and start the processes, which then make their objects. ``over``:
    is told how to end what was started. Raises PlanError where there is no room."""
    if terms.address is None:
        check_room(layouts, [this_machine(layouts)])
    watchdog = Watchdog.start()
    over.callback(watchdog.close)
    folder = launch.run_folder(watchdog.name, terms.address)
    watchdog.remove_in_the_end(folder)
    private.share(folder)
    python = (
        None
        if any(layout.bundle.gpus for layout in layouts)
        else servers.executable(folder, IMPORTED, terms.threads)
    )
    starting = WorkerStart(terms.threads, python, agents=any(role.env for role in roles.values()))
    with watchdog.marking():
        controllers = launch.start(
            terms.address, _processors(layouts), folder, terms.insecure, workers=starting
        )
    over.callback(launch.leave, controllers)
    check_room(layouts, [node["Resources"] for node in launch.ray_nodes() if node["Alive"]])
    started = Started(terms, controllers)
    over.callback(started.end)
    _place(started.groups, layouts)
    needs = {name: need.resources() for layout in layouts for name, need in layout.needs.items()}
    points = launch.rendezvous_points(started.groups, folder)
    for name, role in roles.items():
        started.pools[name] = _pool(
            terms, name, role, started.groups[name], points[name], needs[name], starting
        )
    return started


def _processors(layouts: Sequence[Layout]) -> int:
    return math.ceil(sum(layout.bundle.cpus * layout.ranks for layout in layouts) / GRAIN)


def this_machine(layouts: Sequence[Layout]) -> dict[str, float]:
    """The resources of a Ray that is started here: its GPUs, and as many processors as are asked for, since
    processes can share those."""
    return {"CPU": max(_processors(layouts), os.cpu_count() or 1), "GPU": torch.cuda.device_count()}


# -- placement
# ------------------------------------------------------------------------------------------------------------


def _place(groups: dict[str, PlacementGroup], layouts: Sequence[Layout]) -> None:
    """Reserve the bundles of each layout, into ``groups`` by role. Raises PlanError where there is no room;
    what was reserved is there."""
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
    """The node of each bundle where ``per_node`` says how many lie together: nodes of their own for blocks of
    bundles, which Ray finds for bundles as large as a block. Ranks get bundles of their own all the same, so
    that those that share a GPU lie on the same one."""
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
    terms: Terms,
    name: str,
    role: RoleStart,
    group: PlacementGroup,
    point: str,
    need: Mapping[str, float],
    starting: WorkerStart,
) -> Pool[JobMember]:
    """Start the processes of a role."""
    ranks = group.bundle_count
    nodes = launch.nodes_of(group)
    places = seated(
        Here(terms.name, name, 0, ranks, 0, 0, 0, 0, point if role.distributed else ""),
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
            terms.threads,
            terms.interface,
            terms.insecure,
        )
        for place in places
    ]
    meet = (terms.interface, terms.insecure) if role.distributed and not point.startswith("/") else None
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
    """The place of each rank. ``first``: what all of them have in common; ``nodes``: the node of each
    rank."""
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
    """A pickle of a user's class that can be read where its module cannot be imported. Classes of installed
    packages go by name."""
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
    """Wait until all objects are made. Raises PlanError with the error of one that could not be, and where
    Ray is lost meanwhile."""
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
            expected=f"all ranks there within {seconds:g} s",
            remedy="Job(seconds=…) gives them longer",
        ) from error
