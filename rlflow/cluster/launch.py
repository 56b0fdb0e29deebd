"""Starts a local Ray on the loopback address for a run, or joins a running one, and makes pools in it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rlflow.cluster import token
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.monitor import Newcomers, WatchedWorker, end
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.ray_thread import RayLate, asked, connect, disconnect
from rlflow.cluster.reach import Listening, check_local, check_speaks
from rlflow.cluster.rpc.actor import make_pool
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.replies import of_answer
from rlflow.cluster.setup import Setup
from rlflow.cluster.worker import Worker, own_process
from rlflow.compiler.placement import Placement
from rlflow.errors import Late, PlanError, RemoteError
from rlflow.processes.interfaces import refuse_public
from rlflow.processes.watchdog import launcher, private

T = TypeVar("T")
Groups = dict[str, PlacementGroup]  # pool → its placement group
# in the run's private folder: the folder of its Ray; in a pool's folder there: the rendezvous file
RAY, RENDEZVOUS = "r", "meeting"
STORE = 512 << 20  # bytes of shared memory of a local Ray, for columns and weights under way
# of Ray's folder, the longest path of a socket in it
SESSION = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
SOCKET = 107  # most bytes of a socket's path
REACH_SECONDS = 30.0  # how long a running Ray may take to be joined
START_SECONDS = 120.0  # how long a Ray of our own may take to start
LOOK = 1.0  # seconds between two looks whether a pool is placed
PLACED_SECONDS = 30.0  # how long a cluster may take to place a pool
# how long workers may take to end the processes of their rewards, which otherwise end with them
CLOSED_SECONDS = 5.0


def run_folder(name: str, address: str | None) -> Path:
    """The path of a run's private folder for rendezvous files and its own Ray; the folder does not exist yet.
    Raises PlanError where no place for temporary files is safe from other users, or their paths are too long
    for Ray's sockets."""
    longest = 4096 if address else SOCKET - SESSION - len(f"/{private.PREFIX}{name}/{RAY}")
    try:
        return Path(
            private.place(longest, filter(None, [os.environ.get("RAY_TMPDIR")])), f"{private.PREFIX}{name}"
        )
    except OSError as error:
        raise PlanError.of(
            "private-folder",
            "there is no place for the sockets and files of a run on pools",
            found=str(error),
            expected="a folder of this user's or of root's, with its sticky bit where others write to "
            f"it, and a path of at most {longest} bytes",
            remedy="set TMPDIR to such a folder",
        ) from error


def start(
    address: str | None,
    ranks: int,
    folder: Path,
    insecure: bool = False,
    commits: int = 0,
    workers: WorkerStart | None = None,
    seconds: float = REACH_SECONDS,
) -> Controllers:
    """Join the Ray at ``address`` within so many seconds, or start one here with room for ``ranks`` workers
    and ``commits`` bytes of commits, with its files in the run's ``folder``. ``workers``: how a Ray that is
    started here starts workers. Gives the controlling processes of the Ray. Raises PlanError where there is
    no Ray to join, it does not start, or it would be open to others."""
    refuse_open(insecure)
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that nobody waits for after a death
    # idle processes, none with the environment of a run's workers
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if ray.is_initialized():
        raise PlanError.of(
            "ray-twice",
            "this process is connected to a Ray already",
            found="an earlier ray.init or another run",
            expected="a process of its own for each cluster run",
            remedy="ray.shutdown() first",
        )
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "configure_logging": False,
        "namespace": f"rlflow-{secrets.token_hex(4)}",
    }
    try:
        _quieten()
        if address is not None:
            return _join(address, seconds, insecure, quiet)
        return _start_here(
            max(ranks, os.cpu_count() or 1), folder, commits, workers or WorkerStart(1, agents=True), quiet
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        found = str(error).splitlines()[0]
        if address is not None:
            raise PlanError.of(
                "ray",
                f"there is no Ray to join at '{address}'",
                found=found,
                expected="a running Ray of the same version, with its token",
                remedy="--ray-address auto, or HOST:PORT with the port of `ray start --head`, which is "
                "6379 unless its --port says another (8265 is that of its dashboard, 10001 that of its "
                "client); without an address a Ray is started on this machine",
            ) from error
        raise PlanError.of(
            "ray",
            "Ray did not start",
            found=found,
            expected="a Ray on this machine that answers",
            remedy="--ray-address HOST:PORT joins one that runs; --pools POOL=RANKS@threads needs none",
        ) from error


def _join(address: str, seconds: float, insecure: bool, how: Mapping[str, Any]) -> Controllers:
    """Join a Ray. Raises PlanError for one that is open to others, and OSError, RuntimeError, ValueError or
    RayError where there is none."""
    token.guard()
    limit = time.monotonic() + seconds
    gcs = check_speaks(address, seconds)
    left = max(limit - time.monotonic(), 1.0)
    try:
        connect(partial(ray.init, address=address, **how), left)
    except RayLate as late:
        raise RayLate(
            f"{'it speaks as Ray does' if gcs else 'a Ray was found'}, but not as Ray's controller (GCS): "
            f"no answer within {seconds:g} s"
        ) from late
    refuse_public_nodes(insecure)
    return Controllers(gcs=Listening(gcs) if gcs else None)


def _start_here(
    processors: int, folder: Path, commits: int, workers: WorkerStart, how: Mapping[str, Any]
) -> Controllers:
    """Start a Ray on the loopback address. Raises OSError, RuntimeError, ValueError or RayError where it does
    not start."""
    check_local()
    private.share(folder)  # Ray gives all users rights to its own folder: what it lies in keeps them away

    def starting() -> None:
        with _on_loopback(), workers.applied():
            ray.init(
                address="local",
                num_cpus=processors,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder / RAY),
                object_store_memory=store_bytes(commits),
                **how,
            )

    token.make_own(folder)
    try:
        connect(starting, START_SECONDS)
    except BaseException:
        token.forget_own()
        raise
    return Controllers.of_this_process()


def refuse_public_nodes(insecure: bool) -> None:
    """Disconnect from a Ray that listens on public addresses. Raises PlanError for such a Ray unless
    ``insecure`` holds."""
    try:
        refuse_public(dict.fromkeys(node["NodeManagerAddress"] for node in ray_nodes()), insecure)
    except PlanError:
        disconnect()
        raise


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """While inside, have a Ray that starts use the address 127.0.0.1. Without this it would listen on all
    addresses, except on systems where it supports no clusters."""
    constants = sys.modules["ray._private.ray_constants"]
    before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before  # type: ignore[attr-defined]


def _quieten() -> None:
    """Keep Ray from printing pages of logs where one of its processes dies; the health monitor reports
    deaths."""
    module = sys.modules.get("ray._private.worker")
    if hasattr(module, "print_to_stdstream"):  # another version of Ray prints them all the same
        module.print_to_stdstream = lambda *words, **more: None  # type: ignore[union-attr]


def store_bytes(commits: int) -> int:
    """The bytes of a local Ray's object store: room for columns under way, and for commits as far as shared
    memory has it. Ray writes the rest to disk."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return max(STORE, min(STORE + commits, free * 9 // 10))


def refuse_open(insecure: bool) -> None:
    """Raises PlanError where RAY_AUTH_MODE turns Ray's token off: anyone who reaches its ports could then run
    code as this user."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token" and not insecure:
        raise PlanError.of(
            "ray-open",
            "Ray without a token lets everybody who reaches its ports run code as this user",
            found=f"RAY_AUTH_MODE={mode}",
            expected="RAY_AUTH_MODE=token, or unset",
            remedy="unset it, or say --insecure true where the network is closed",
        )


def place_pools(placement: Placement, gpus: bool, seconds: float = PLACED_SECONDS) -> Groups:
    """Make a placement group for each pool, with a bundle for each rank; pools that share devices have one
    group together. Raises PlanError where the cluster has no room within ``seconds``."""
    have = resources("cluster_resources")
    kind = "GPU" if gpus else "CPU"
    bundles = {names: _bundle(placement, names, gpus) for names in placement.devices()}
    need = sum(bundle[kind] * placement.pools[names[0]] for names, bundle in bundles.items())
    if have.get(kind, 0) < need:
        raise PlanError.of(
            "no-room",
            f"the pools need {need:g} {kind}s",
            found=f"{have.get(kind, 0):g} in the cluster",
            expected=", ".join(f"{name}: {ranks}" for name, ranks in placement.pools.items()),
            remedy="fewer ranks in --pools, or a larger cluster",
        )
    groups = {
        names: reserve([dict(bundle) for _ in range(placement.pools[names[0]])], strategy="PACK")
        for names, bundle in bundles.items()
    }
    return settled(
        {name: groups[names] for name in placement.pools for names in groups if name in names}, seconds
    )


def reserve(bundles: Sequence[dict[str, float]], **how: Any) -> PlacementGroup:
    """A placement group of these bundles, which Ray places when it has room. Raises PlanError where Ray does
    not answer."""
    group: PlacementGroup = answered(partial(placement_group, list(bundles), **how))
    return group


def release(group: PlacementGroup) -> None:
    """Remove a placement group; nothing happens where Ray does not answer."""
    with contextlib.suppress(RayLate):
        asked(partial(remove_placement_group, group))


def answered(call: Callable[[], T]) -> T:
    """What a call of Ray gives. Raises PlanError where Ray does not answer."""
    try:
        return asked(call)
    except RayLate as late:
        raise _gone(str(late)) from late


def refuse_lost(controllers: Controllers) -> None:
    """Raises PlanError where a controlling process of Ray is lost."""
    if (lost := controllers.lost()) is not None:
        raise _gone(lost)


def _gone(found: str) -> PlanError:
    return PlanError.of(
        "ray-gone",
        "the Ray is lost on which the run was to start",
        found=found,
        expected="one that answers",
        remedy="`ray status` on its first machine shows whether it is back; then the same command again",
    )


def _bundle(placement: Placement, names: Sequence[str], gpus: bool) -> dict[str, float]:
    """The resources that a rank of each of the pools needs together."""
    needs = [rank_needs(placement, name, gpus) for name in names]
    whole = {kind: sum(need.get(kind, 0.0) for need in needs) for kind in ("GPU", "CPU")}
    return {kind: float(math.ceil(amount - 1e-9)) for kind, amount in whole.items() if amount}


def rank_needs(placement: Placement, pool: str, gpus: bool) -> dict[str, float]:
    """The resources of one rank of a pool: with GPUs its part of one beside a processor, else its part of a
    processor."""
    part = float(placement.shares.get(pool, 1))
    return {"GPU": part, "CPU": 1.0} if gpus else {"CPU": part}


def settled(groups: Groups, seconds: float) -> Groups:
    """The groups once all are placed. Raises PlanError where one is not placed in time; all are removed
    then."""
    try:
        wait_for_room(groups, seconds)
    except BaseException:
        for group in groups.values():
            release(group)
        raise
    return groups


def wait_for_room(groups: Mapping[str, PlacementGroup], seconds: float = PLACED_SECONDS) -> None:
    """Wait until all pools are placed, also anew after the loss of a node. Raises PlanError where one is not
    placed in time."""
    limit = time.monotonic() + seconds
    for name, group in groups.items():
        if not _placed(name, group, max(limit - time.monotonic(), 0.0)):
            kind = "GPU" if "GPU" in group.bundle_specs[0] else "CPU"
            raise PlanError.of(
                "no-room",
                f"pool '{name}' found no room in {seconds:g} s",
                found=f"{resources('available_resources').get(kind, 0):g} {kind}s free",
                expected=f"{len(group.bundle_specs)} {kind}s",
                remedy="wait until other jobs end (a run: --wait-for-nodes SECONDS), or fewer ranks",
            )


def _placed(name: str, group: PlacementGroup, seconds: float) -> bool:
    """Wait for the placement of a group. Gives whether it is placed. Raises PlanError where the cluster does
    not know the group any more."""
    limit = time.monotonic() + seconds
    try:
        while not (placed := bool(answered(partial(group.wait, LOOK)))) and time.monotonic() < limit:
            pass
        return placed
    except PlanError:
        raise
    except Exception as error:  # Ray has no type for it
        raise PlanError.of(
            "no-room",
            f"pool '{name}' has no place in the cluster any more",
            found=str(error).splitlines()[0],
            expected="the cluster in which the run began",
            remedy="rlflow resume RUN, once the cluster is there",
        ) from error


def resources(which: str) -> dict[str, float]:
    """The resources of the cluster by name. ``which``: "cluster_resources" for all, "available_resources" for
    free ones."""
    return dict(answered(getattr(ray, which)))


def make_workers(
    setups: Mapping[str, list[Setup]], groups: Mapping[str, PlacementGroup], start: WorkerStart
) -> dict[str, Pool[Worker]]:
    """Start the workers of pools, which load in parallel; ``Pool.made`` waits for them. Gives the pools by
    name."""
    pools, ways = {}, asked_of_ray(start)
    for name, ranks in setups.items():
        need = rank_needs(ranks[0].placement, name, "GPU" in groups[name].bundle_specs[0])
        resources = {"num_cpus": need["CPU"], **ways, **({"num_gpus": need["GPU"]} if "GPU" in need else {})}
        options = ranks[0].config.options
        meet = (
            (options.interface, options.insecure)
            if len(ranks) > 1 and not ranks[0].rendezvous.startswith("/")
            else None
        )
        pools[name] = make_pool(
            name, own_process, len(ranks), partial(_setup_of, ranks), groups[name], meet, **resources
        )
    return pools


def asked_of_ray(start: WorkerStart, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options of an actor with which Ray starts its process as ``start`` says. ``variables``: more
    variables of its environment."""
    if start.built_in and not variables:
        return {}
    here = {"py_executable": start.python} if start.python is not None and all_here() else {}
    return {"runtime_env": {"env_vars": {**start.variables, **(variables or {})}, **here}}


def wait_for_models(pools: Iterable[Pool[Worker]], seconds: float, controllers: Controllers) -> None:
    """Wait until all workers have loaded, and connect to them. Raises PlanError with the error of one that
    has not, and where Ray is lost meanwhile."""
    loading = []
    for pool in pools:
        pool.watcher = Newcomers(pool, controllers)
        loading.append((pool, pool.made(seconds)))
    try:
        for pool, future in loading:
            future.result()
            pool.connect()
    except RemoteError as error:
        refuse_lost(controllers)
        raise PlanError.of(
            "worker-load",
            "a worker did not load its models",
            found=str(error),
            expected=f"all workers there within {seconds:g} s",
            remedy=f"--load-timeout {2 * seconds:g}, where it is but slow"
            if isinstance(error, Late)
            else "the same without --pools shows where it fails; who is gone may have had too little memory",
        ) from error


def _setup_of(ranks: list[Setup], rank: int) -> tuple[bytes]:
    return (of_answer(ranks[rank]),)


def rendezvous_points(groups: Mapping[str, PlacementGroup], folder: Path) -> dict[str, str]:
    """Pool → the rendezvous of its ranks: the path of a file in a folder of the pool within the run's. For a
    pool on several machines it is a name alone, since the first rank gives the address."""
    names = {pool: f"{pool}-{secrets.token_hex(8)}/{RENDEZVOUS}" for pool in groups}
    return {pool: name if _is_apart(groups[pool]) else f"{folder}/{name}" for pool, name in names.items()}


def _is_apart(group: PlacementGroup) -> bool:
    return len(set(nodes_of(group).values())) > 1


def nodes_of(group: PlacementGroup) -> dict[int, str]:
    """Rank → its node."""
    return dict(answered(partial(placement_group_table, group))["bundles_to_node_id"])


def all_here() -> bool:
    """Whether this machine is the only one of the Ray."""
    return {node["NodeManagerHostname"] for node in ray_nodes() if node["Alive"]} == {socket.gethostname()}


def ray_nodes() -> list[dict[str, Any]]:
    """The nodes of the Ray to which this process is connected, as Ray describes them."""
    return list(answered(ray.nodes))


def stop(
    pools: Mapping[str, Pool[Any]], groups: Mapping[str, PlacementGroup], watched: Sequence[WatchedWorker]
) -> None:
    """End the processes of rewards, the workers and the placement groups. A worker that Ray cannot end is
    killed."""
    actors = [actor for pool in pools.values() for actor in pool.actors]
    for pool in pools.values():
        pool.sockets.close()
    with contextlib.suppress(Exception):
        closing = [
            pool.send(rank, "close", group="control") for pool in pools.values() for rank in range(len(pool))
        ]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSED_SECONDS, fetch_local=False)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    for worker in watched:
        with contextlib.suppress(Exception):
            end(worker.presence, asked=True)
    for group in groups.values():
        with contextlib.suppress(Exception):
            release(group)


def leave(controllers: Controllers) -> None:
    """Disconnect from Ray, and end one that was started here. Where it has lost a controller, this process
    exits at once instead, since Ray would wait for it."""
    if controllers.lost():
        launcher.leave_at_once()
    else:
        disconnect()
    token.forget_own()
