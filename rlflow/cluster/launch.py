"""Start a Ray cluster on this machine for a run, or join a running one, and start pools of workers in it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
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

from rlflow.cluster import ray_private, token
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.monitor import Newcomers, WatchedWorker, end
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.ray_thread import RayLate, asked, connect, disconnect
from rlflow.cluster.reach import Listening, check_joins, check_local, check_speaks
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
# folder of the run's Ray in the run's private folder; rendezvous file in a pool's folder there
RAY, RENDEZVOUS = "r", "meeting"
STORE = 512 << 20  # bytes of a local Ray's shared memory, for columns and weights in transit
# longest path of a socket within Ray's folder
SESSION = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
SOCKET = 107  # maximum size of a socket's path in bytes
REACH_SECONDS = 30.0  # time limit to join a running Ray cluster
START_SECONDS = 120.0  # time limit to start a Ray cluster
LOOK = 1.0  # seconds between two checks whether a pool is placed
PLACED_SECONDS = 30.0  # time limit to place a pool in the cluster
# time limit for workers to end the processes of their rewards; later, these end together with the workers
CLOSED_SECONDS = 5.0


def run_folder(name: str, address: str | None) -> Path:
    """Return the path of a run's private folder, without creating it.

    The folder holds rendezvous files and the files of the run's own Ray cluster. ``address``: the Ray cluster
    that the run joins, if any. Raises PlanError if every folder for temporary files is open to other users,
    or if paths in the folder would be too long for Ray's sockets.
    """
    longest = 4096 if address else SOCKET - SESSION - len(f"/{private.PREFIX}{name}/{RAY}")
    try:
        return Path(
            private.place(longest, filter(None, [os.environ.get("RAY_TMPDIR")])), f"{private.PREFIX}{name}"
        )
    except OSError as error:
        raise PlanError.of(
            "private-folder",
            "no folder is suitable for the sockets and files of a run on pools",
            found=str(error),
            expected="a folder owned by this user or root, with the sticky bit set if others can write to it, "
            f"and a path of at most {longest} bytes",
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
    """Join the Ray cluster at ``address`` or, if that is None, start one on this machine.

    A new cluster has room for ``ranks`` workers and ``commits`` bytes of in-memory checkpoints, and keeps its
    files in ``folder``. ``insecure``: whether the cluster may be open to other users. ``workers``: how Ray
    starts workers. ``seconds``: the time limit for joining. Returns the cluster's controlling processes.
    Raises PlanError if the cluster can't be joined or started, or if it would be open to other users.
    """
    refuse_open(insecure)
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # calls to a dead worker, for which nobody waits, would print errors
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # processes that Ray starts in advance would not have the environment of a run's workers
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if ray.is_initialized():
        raise PlanError.of(
            "ray-twice",
            "this process is already connected to a Ray",
            found="an earlier ray.init or another run",
            expected="a separate process for each run on pools",
            remedy="call ray.shutdown() first",
        )
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "configure_logging": False,
        "namespace": f"rlflow-{secrets.token_hex(4)}",
    }
    try:
        ray_private.print_no_logs()  # the health monitor reports the death of a process
        if address is not None:
            return _join(address, seconds, insecure, quiet)
        return _start_here(
            max(ranks, os.cpu_count() or 1), folder, commits, workers or WorkerStart(1, agents=True), quiet
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise _no_ray(address, str(error).splitlines()[0]) from error


def _no_ray(address: str | None, found: str) -> PlanError:
    """Return the error for a Ray cluster that can't be joined or, if ``address`` is None, can't be started.

    ``found``: what went wrong.
    """
    if address is None:
        return PlanError.of(
            "ray",
            "Ray did not start",
            found=found,
            expected="a Ray on this machine that responds",
            remedy="join a running Ray with --ray-address HOST:PORT, or use --pools POOL=RANKS@threads, which needs no Ray",
        )
    return PlanError.of(
        "ray",
        f"cannot join a Ray at '{address}'",
        found=found,
        expected="a running Ray of the same version, with its token",
        remedy="pass --ray-address auto, or HOST:PORT with the port of `ray start --head`: 6379 unless "
        "you set --port (8265 is the port of the dashboard, 10001 of the client). Without an address, "
        "rlflow starts a Ray on this machine",
    )


def _join(address: str, seconds: float, insecure: bool, how: Mapping[str, Any]) -> Controllers:
    """Join the Ray cluster at ``address``, and return its controlling processes.

    ``how``: arguments of ``ray.init``. Raises PlanError if the cluster is open to other users, and OSError,
    RuntimeError, ValueError or RayError if it can't be joined.
    """
    token.guard()
    limit = time.monotonic() + seconds
    gcs = check_speaks(address, seconds)
    found = (
        f"{'a server with the protocol of Ray answered' if gcs else 'a Ray was found'}, but Ray's "
        f"controller (GCS) did not answer within {seconds:g} s"
    )
    try:
        check_joins(address, max(limit - time.monotonic(), 1.0))
        connect(partial(ray.init, address=address, **how), seconds, str(_no_ray(address, found)))
    except (RayLate, TimeoutError) as late:
        raise RayLate(found) from late
    refuse_public_nodes(insecure)
    return Controllers(gcs=Listening(gcs) if gcs else None)


def _start_here(
    processors: int, folder: Path, commits: int, workers: WorkerStart, how: Mapping[str, Any]
) -> Controllers:
    """Start a Ray cluster on the loopback address, and return its controlling processes.

    Raises OSError, RuntimeError, ValueError or RayError if this fails.
    """
    check_local()
    # Ray makes its own folder accessible to all users; the private parent folder keeps them out
    private.share(folder)

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
        found = f"Ray has not answered within {START_SECONDS:g} s"
        connect(starting, START_SECONDS, str(_no_ray(None, found)))
    except BaseException:
        token.forget_own()
        raise
    return Controllers.of_this_process()


def refuse_public_nodes(insecure: bool) -> None:
    """Disconnect from Ray and raise PlanError if a node of the cluster listens on a public address.

    If ``insecure`` is true, public addresses are allowed.
    """
    try:
        refuse_public(dict.fromkeys(node["NodeManagerAddress"] for node in ray_nodes()), insecure)
    except PlanError:
        disconnect()
        raise


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray clusters that are started in this context listen on 127.0.0.1 only.

    Normally, Ray listens on all addresses of the machine, except on systems where it can't use several
    machines.
    """
    before = ray_private.listens_on_all_addresses()
    ray_private.listen_on_all_addresses(False)
    try:
        yield
    finally:
        ray_private.listen_on_all_addresses(before)


def store_bytes(commits: int) -> int:
    """Return how many bytes the object store of a Ray cluster on this machine should have.

    The store has room for columns in transit and, if shared memory is large enough, for ``commits`` bytes of
    in-memory checkpoints. Ray writes objects that don't fit to disk.
    """
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return max(STORE, min(STORE + commits, free * 9 // 10))


def refuse_open(insecure: bool) -> None:
    """Raise PlanError if RAY_AUTH_MODE turns Ray's token off, unless ``insecure`` is true.

    Without a token, anyone who can reach Ray's ports can run code as this user.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token" and not insecure:
        raise PlanError.of(
            "ray-open",
            "without a token, anyone who reaches Ray's ports can run code as this user",
            found=f"RAY_AUTH_MODE={mode}",
            expected="RAY_AUTH_MODE=token, or unset",
            remedy="unset it, or pass --insecure true on a closed network",
        )


def place_pools(placement: Placement, gpus: bool, seconds: float = PLACED_SECONDS) -> Groups:
    """Reserve a placement group for each pool, and return the groups by pool.

    A group has one bundle per rank. Pools that share devices share a group. ``gpus``: whether ranks use GPUs.
    Raises PlanError if the cluster doesn't have enough room within ``seconds``.
    """
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
            remedy="use fewer ranks in --pools, or a larger cluster",
        )
    groups = {
        names: reserve([dict(bundle) for _ in range(placement.pools[names[0]])], strategy="PACK")
        for names, bundle in bundles.items()
    }
    return settled(
        {name: groups[names] for name in placement.pools for names in groups if name in names}, seconds
    )


def reserve(bundles: Sequence[dict[str, float]], **how: Any) -> PlacementGroup:
    """Request a placement group with these bundles, and return it. Ray places it once there is room.

    ``how``: further arguments of Ray's ``placement_group``. Raises PlanError if Ray doesn't answer.
    """
    group: PlacementGroup = answered(partial(placement_group, list(bundles), **how))
    return group


def release(group: PlacementGroup) -> None:
    """Remove a placement group. It's not an error if Ray doesn't answer."""
    with contextlib.suppress(RayLate):
        asked(partial(remove_placement_group, group))


def answered(call: Callable[[], T]) -> T:
    """Make a call to Ray in a separate thread, and return its result.

    Raises PlanError if Ray doesn't answer.
    """
    try:
        return asked(call)
    except RayLate as late:
        raise _gone(str(late)) from late


def refuse_lost(controllers: Controllers) -> None:
    """Raise PlanError if a controlling process of Ray has died."""
    if (lost := controllers.lost()) is not None:
        raise _gone(lost)


def _gone(found: str) -> PlanError:
    return PlanError.of(
        "ray-gone",
        "the Ray for this run is lost",
        found=found,
        expected="a Ray that answers",
        remedy="run `ray status` on its first machine to see whether it is back, then repeat the command",
    )


def _bundle(placement: Placement, names: Sequence[str], gpus: bool) -> dict[str, float]:
    """Return the resources of a bundle that holds one rank of each of these pools."""
    needs = [rank_needs(placement, name, gpus) for name in names]
    whole = {kind: sum(need.get(kind, 0.0) for need in needs) for kind in ("GPU", "CPU")}
    return {kind: float(math.ceil(amount - 1e-9)) for kind, amount in whole.items() if amount}


def rank_needs(placement: Placement, pool: str, gpus: bool) -> dict[str, float]:
    """Return the resources of one rank of a pool.

    These are its share of a GPU and one CPU if ``gpus`` is true, otherwise its share of a CPU.
    """
    part = float(placement.shares.get(pool, 1))
    return {"GPU": part, "CPU": 1.0} if gpus else {"CPU": part}


def settled(groups: Groups, seconds: float) -> Groups:
    """Wait until all placement groups are placed, and return them.

    If one isn't placed within ``seconds``, removes them all and raises PlanError.
    """
    try:
        wait_for_room(groups, seconds)
    except BaseException:
        for group in groups.values():
            release(group)
        raise
    return groups


def wait_for_room(groups: Mapping[str, PlacementGroup], seconds: float = PLACED_SECONDS) -> None:
    """Wait until the placement groups of all pools are placed, including after the loss of a node.

    Raises PlanError if one isn't placed within ``seconds``.
    """
    limit = time.monotonic() + seconds
    for name, group in groups.items():
        if not _placed(name, group, max(limit - time.monotonic(), 0.0)):
            kind = "GPU" if "GPU" in group.bundle_specs[0] else "CPU"
            raise PlanError.of(
                "no-room",
                f"pool '{name}' could not be placed within {seconds:g} s",
                found=f"{resources('available_resources').get(kind, 0):g} {kind}s free",
                expected=f"{len(group.bundle_specs)} {kind}s",
                remedy="wait until other jobs end (runs: set --wait-for-nodes SECONDS), or use fewer ranks",
            )


def _placed(name: str, group: PlacementGroup, seconds: float) -> bool:
    """Wait up to ``seconds`` for a group to be placed, and return whether it is.

    Raises PlanError if the cluster no longer knows the group.
    """
    limit = time.monotonic() + seconds
    try:
        while not (placed := bool(answered(partial(group.wait, LOOK)))) and time.monotonic() < limit:
            pass
        return placed
    except PlanError:
        raise
    except Exception as error:  # Ray has no separate error type for this
        raise PlanError.of(
            "no-room",
            f"pool '{name}' lost its place in the cluster",
            found=str(error).splitlines()[0],
            expected="the cluster on which the run started",
            remedy="run `rlflow resume RUN` once the cluster is back",
        ) from error


def resources(which: str) -> dict[str, float]:
    """Return the cluster's resources: name → amount.

    ``which``: "cluster_resources" for all resources, or "available_resources" for those that are free.
    """
    return dict(answered(getattr(ray, which)))


def make_workers(
    setups: Mapping[str, list[Setup]], groups: Mapping[str, PlacementGroup], start: WorkerStart
) -> dict[str, Pool[Worker]]:
    """Start the workers of all pools, and return the pools by name.

    ``setups``: pool name → the setup of each rank. The workers load their models afterwards; ``Pool.made``
    waits for that.
    """
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
    """Return the options for a Ray actor whose process is to be started as ``start`` describes.

    ``variables``: additional environment variables.
    """
    if start.built_in and not variables:
        return {}
    here = {"py_executable": start.python} if start.python is not None and all_here() else {}
    return {"runtime_env": {"env_vars": {**start.variables, **(variables or {})}, **here}}


def wait_for_models(pools: Iterable[Pool[Worker]], seconds: float, controllers: Controllers) -> None:
    """Wait until all workers have loaded their models, then open connections to them.

    Raises PlanError if Ray is lost or a worker fails to load its models; the message then has the worker's
    error.
    """
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
            "a worker could not load its models",
            found=str(error),
            expected=f"all workers loaded within {seconds:g} s",
            remedy=f"if it is only slow, set --load-timeout {2 * seconds:g}"
            if isinstance(error, Late)
            else "run the same command without --pools to see where loading fails; a worker that died may have "
            "run out of memory",
        ) from error


def _setup_of(ranks: list[Setup], rank: int) -> tuple[bytes]:
    return (of_answer(ranks[rank]),)


def rendezvous_points(groups: Mapping[str, PlacementGroup], folder: Path) -> dict[str, str]:
    """Return each pool's rendezvous: the path of a file in the run's folder.

    If the pool spans several machines, this is only a name, and its first rank provides the real address.
    """
    names = {pool: f"{pool}-{secrets.token_hex(8)}/{RENDEZVOUS}" for pool in groups}
    return {pool: name if _is_apart(groups[pool]) else f"{folder}/{name}" for pool, name in names.items()}


def _is_apart(group: PlacementGroup) -> bool:
    return len(set(nodes_of(group).values())) > 1


def nodes_of(group: PlacementGroup) -> dict[int, str]:
    """Return the node id of each bundle of a placement group."""
    return dict(answered(partial(placement_group_table, group))["bundles_to_node_id"])


def all_here() -> bool:
    """Whether all nodes of the connected Ray cluster are on this machine."""
    return {node["NodeManagerHostname"] for node in ray_nodes() if node["Alive"]} == {socket.gethostname()}


def ray_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the connected Ray cluster, in the format of ``ray.nodes()``."""
    return list(answered(ray.nodes))


def stop(
    pools: Mapping[str, Pool[Any]], groups: Mapping[str, PlacementGroup], watched: Sequence[WatchedWorker]
) -> None:
    """End the workers of pools and their reward processes, and remove the placement groups.

    ``watched``: the workers to kill if Ray can't end them.
    """
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
    """Disconnect from Ray, and end the cluster if this process started it.

    If Ray has lost a controlling process, this process will exit without running Ray's exit handlers, because
    they would wait for the lost one.
    """
    if controllers.lost():
        launcher.leave_at_once()
    else:
        disconnect()
    token.forget_own()
