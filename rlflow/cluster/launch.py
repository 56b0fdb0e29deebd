"""Ray for a run: a local one of its own on the loopback address, or one that is there; and pools in it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.health.monitor import Newcomers, WatchedWorker, end
from rlflow.cluster.rpc.pool import Pool, make_pool
from rlflow.cluster.setup import Setup
from rlflow.cluster.worker import Worker
from rlflow.errors import Late, PlanError, RemoteError
from rlflow.interfaces import refuse_public
from rlflow.watchdog import launcher, private
from rlflow.watchdog.signals import own_terminations

Groups = dict[str, PlacementGroup]  # of each pool
RAY, MEETING = "r", "meeting"  # in the run's folder: that of its Ray; in a pool's folder there
STORE = 512 << 20  # bytes of shared memory for columns and weights on their way, on a local Ray
SESSION = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")  # of Ray's folder, the longest path of a socket in it
SOCKET = 107  # bytes that such a path may have
REACH_SECONDS = 10.0  # how long a running Ray may take to answer
PLACED_SECONDS = 30.0  # how long a cluster may take to give what a pool needs
CLOSED_SECONDS = 5.0  # how long workers may take to end the processes of their rewards, which otherwise end with them


def token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def guard_token() -> None:
    """Ray's token for this machine's user, readable by nobody else, before Ray makes one that is. Ray itself turns authentication on
    where RAY_AUTH_MODE says nothing. Raises PlanError where it has no place."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = token_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.stat().st_size:  # of a process that ended before it had written
            path.unlink()
        if not path.exists():
            _make_token(path)
        path.chmod(0o600)
    except OSError as error:
        raise PlanError.of("ray-token", f"Ray's token cannot be kept in '{path}'", found=str(error.strerror),
                           expected="a file that this user alone reads and writes",
                           remedy="set RAY_AUTH_TOKEN_PATH to a file that can be written") from error


def _make_token(path: Path) -> None:
    """Whole or not at all: another run that begins may read it at once. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # the other one's will do
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def run_folder(name: str, address: str | None) -> Path:
    """Where a run keeps what its processes meet at, and a Ray of its own, by the run's name: not there yet. Raises PlanError where no place
    for temporary files is safe from other users, or all are too far down for Ray's sockets."""
    longest = 4096 if address else SOCKET - SESSION - len(f"/{private.PREFIX}{name}/{RAY}")
    try:
        return Path(private.place(longest, filter(None, [os.environ.get("RAY_TMPDIR")])), f"{private.PREFIX}{name}")
    except OSError as error:
        raise PlanError.of("private-folder", "there is no place for the sockets and files of a run on pools", found=str(error),
                           expected="a folder of this user's or of root's, with its sticky bit where others write to it, and a path of "
                                    f"at most {longest} bytes", remedy="set TMPDIR to such a folder") from error


def start(address: str | None, ranks: int, folder: Path, insecure: bool = False, commits: int = 0) -> Controllers:
    """Join the Ray at ``address``, or start one here with room for ``ranks`` workers and ``commits`` bytes beside what is on its way, and
    with its own files in the run's ``folder``. Raises PlanError."""
    refuse_open(insecure)
    guard_token()
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": f"rlflow-{secrets.token_hex(4)}"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that nobody waits for after a death
    if ray.is_initialized():
        raise PlanError.of("ray-twice", "this process is connected to a Ray already", found="an earlier ray.init or another run",
                           expected="a process of its own for each cluster run", remedy="ray.shutdown() first")
    try:
        with own_terminations():
            if address is not None:
                reach(address)
                _quieten()
                ray.init(address=address, **quiet)
                refuse_public_nodes(insecure)
                return Controllers()
            _quieten()
            private.share(folder)  # Ray gives all users rights to its own folder: what it lies in keeps them away
            with _on_loopback():
                ray.init(address="local", num_cpus=max(ranks, os.cpu_count() or 1), include_dashboard=False, _node_ip_address="127.0.0.1",
                         _temp_dir=str(folder / RAY), object_store_memory=store_bytes(commits), **quiet)
            return Controllers.of_this_process()
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise PlanError.of("ray", f"there is no Ray to join at '{address}'" if address else "Ray did not start",
                           found=str(error).splitlines()[0], expected="a running Ray of the same version, with its token",
                           remedy="--ray-address auto|HOST:PORT, or none for a local one") from error


def refuse_public_nodes(insecure: bool) -> None:
    """Leave a Ray whose machines know each other by public addresses, on which all of it listens. Raises PlanError."""
    try:
        refuse_public(dict.fromkeys(node["NodeManagerAddress"] for node in ray_nodes()), insecure)
    except PlanError:
        ray.shutdown()
        raise


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a Ray that starts meanwhile take 127.0.0.1 for its address. It would look for one that other machines reach, and listen on all,
    but on systems on which it knows no clusters."""
    constants = sys.modules["ray._private.ray_constants"]
    before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before  # type: ignore[attr-defined]


def _quieten() -> None:
    """Have Ray print nothing of its own where a process of it dies, pages of a log among it: what the run needs to know of it, it says."""
    module = sys.modules.get("ray._private.worker")
    if hasattr(module, "print_to_stdstream"):  # of another version both are heard
        module.print_to_stdstream = lambda *words, **more: None  # type: ignore[union-attr]


def store_bytes(commits: int) -> int:
    """Of a local Ray's store: what is on its way, and commits as far as shared memory has room for them. Ray takes the rest to disk."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return max(STORE, min(STORE + commits, free * 9 // 10))


def refuse_open(insecure: bool) -> None:
    """Raises PlanError where Ray is told to do without its token: who reaches its ports then runs code as this user."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token" and not insecure:
        raise PlanError.of("ray-open", "Ray without a token lets everybody who reaches its ports run code as this user",
                           found=f"RAY_AUTH_MODE={mode}", expected="RAY_AUTH_MODE=token, or unset",
                           remedy="unset it, or say --insecure true where the network is closed")


def reach(address: str) -> None:
    """Raises OSError where nothing answers at HOST:PORT: Ray itself would try for five minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


def place_pools(pools: Mapping[str, int], gpus: bool) -> Groups:
    """A placement group for each pool, a bundle for each rank. Raises PlanError where the cluster has no room."""
    have = resources("cluster_resources")
    kind, each = ("GPU", {"GPU": 1.0, "CPU": 1.0}) if gpus else ("CPU", {"CPU": 1.0})
    need = sum(pools.values())
    if have.get(kind, 0) < need:
        raise PlanError.of("no-room", f"the pools need {need} {kind}s", found=f"{have.get(kind, 0):g} in the cluster",
                           expected=", ".join(f"{name}: {ranks}" for name, ranks in pools.items()),
                           remedy="fewer ranks in --pools, or a larger cluster")
    groups = {name: placement_group([dict(each) for _ in range(ranks)], strategy="PACK") for name, ranks in pools.items()}
    try:
        wait_for_room(groups)
    except PlanError:
        for group in groups.values():
            remove_placement_group(group)
        raise
    return groups


def wait_for_room(groups: Mapping[str, PlacementGroup]) -> None:
    """Until the cluster has given what pools need, anew where a node is lost. Raises PlanError where it does not."""
    for name, group in groups.items():
        if not _placed(name, group):
            kind = "GPU" if "GPU" in group.bundle_specs[0] else "CPU"
            raise PlanError.of("no-room", f"pool '{name}' found no room in {PLACED_SECONDS:g} s",
                               found=f"{resources('available_resources').get(kind, 0):g} {kind}s free",
                               expected=f"{len(group.bundle_specs)} {kind}s", remedy="wait until other jobs end, or fewer ranks in --pools")


def _placed(name: str, group: PlacementGroup) -> bool:
    """Whether a group has its place, waited for. Raises PlanError where the cluster knows of none."""
    try:
        return bool(group.wait(PLACED_SECONDS))
    except Exception as error:  # Ray has no type for it
        raise PlanError.of("no-room", f"pool '{name}' has no place in the cluster any more", found=str(error).splitlines()[0],
                           expected="the cluster in which the run began", remedy="rlflow resume RUN, once the cluster is there") from error


def resources(which: str) -> dict[str, float]:
    """What a cluster has, or has free."""
    return dict(getattr(ray, which)())


def make_workers(setups: Mapping[str, list[Setup]], groups: Mapping[str, PlacementGroup], threads: int) -> dict[str, Pool[Worker]]:
    """The workers of pools, which begin to load side by side; ``Pool.made`` waits for them."""
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}}
    made = {}
    for name, ranks in setups.items():
        resources = {"num_cpus": 1, "runtime_env": environment}
        if "GPU" in groups[name].bundle_specs[0]:
            resources["num_gpus"] = 1
        options = ranks[0].config.options
        meet = (options.interface, options.insecure) if len(ranks) > 1 and not ranks[0].meeting.startswith("/") else None
        made[name] = make_pool(name, Worker, len(ranks), partial(_setup_of, ranks), groups[name], meet, **resources)
    return made


def wait_for_models(pools: Iterable[Pool[Worker]], seconds: float) -> None:
    """Until all workers have loaded, and can be spoken to. Raises PlanError with what kept one from it."""
    loading = []
    for pool in pools:
        pool.watcher = Newcomers(pool)
        loading.append((pool, pool.made(seconds)))
    try:
        for pool, future in loading:
            future.result()
            pool.connect()
    except RemoteError as error:
        raise PlanError.of("worker-load", "a worker did not load its models", found=str(error),
                           expected=f"all workers there within {seconds:g} s",
                           remedy=f"--load-timeout {2 * seconds:g}, where it is but slow" if isinstance(error, Late) else
                           "the same without --pools shows where it fails; who is gone may have had too little memory") from error


def _setup_of(ranks: list[Setup], rank: int) -> tuple[Setup]:
    return (ranks[rank],)


def meetings(groups: Mapping[str, PlacementGroup], folder: Path) -> dict[str, str]:
    """Where the ranks of each pool meet: in a file of the machine that they are on, in a folder of its own within the run's. For pools on
    several machines a name alone: their first rank says where."""
    names = {pool: f"{pool}-{secrets.token_hex(8)}/{MEETING}" for pool in groups}
    return {pool: name if _is_apart(groups[pool]) else f"{folder}/{name}" for pool, name in names.items()}


def apart(groups: Mapping[str, PlacementGroup]) -> set[str]:
    """Pools that are on several machines."""
    return {pool for pool, group in groups.items() if _is_apart(group)}


def _is_apart(group: PlacementGroup) -> bool:
    return len(set(_nodes(group).values())) > 1


def _nodes(group: PlacementGroup) -> dict[int, str]:
    """The node of each rank."""
    return dict(placement_group_table(group)["bundles_to_node_id"])


def ray_nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def stop(pools: Mapping[str, Pool[Worker]], groups: Mapping[str, PlacementGroup], wards: Sequence[WatchedWorker]) -> None:
    """End what was started here: rewards' processes, workers, placement groups. A worker that Ray cannot end is killed."""
    actors = [actor for pool in pools.values() for actor in pool.actors]
    for pool in pools.values():
        pool.lines.close()
    with contextlib.suppress(Exception):
        closing = [pool.send(rank, "close", group="control") for pool in pools.values() for rank in range(len(pool))]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSED_SECONDS, fetch_local=False)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    for ward in wards:
        with contextlib.suppress(Exception):
            end(ward.presence, asked=True)
    for group in groups.values():
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def leave(controllers: Controllers) -> None:
    """End this process's connection, and with it a Ray that was started here. One that has lost a controller would be waited for."""
    if controllers.lost():
        launcher.leave_at_once()
    else:
        ray.shutdown()
