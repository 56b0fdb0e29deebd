"""The torch process group of a pool's ranks, and the rendezvous where the ranks find each other."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rlflow.author import torch_private
from rlflow.processes.interfaces import Interface
from rlflow.processes.watchdog import beside, private
from rlflow.training.weight_sync.segment import machine

# variables from which libraries read the name of a network interface
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = Interface("lo", "127.0.0.1")
SECONDS = 1800.0  # how long a collective may wait for the slowest rank


_listening: list[socket.socket] = []  # socket of the first rank, until the group is joined


def listen(interface: Interface) -> str:
    """Open the rendezvous for a pool on several machines, and return its address, HOST:PORT.

    Only the pool's first rank calls this. The kernel chooses the port. The rendezvous has no password, so any
    process that reaches the interface and finds the port can connect.
    """
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    _listening[:] = [socket.create_server((interface.address, 0), family=family)]
    return f"{interface.address}:{_listening[0].getsockname()[1]}"


def join(rendezvous: str, rank: int, ranks: int, device: str, interface: Interface = LOOPBACK) -> None:
    """Create torch's default process group for a pool. Its ranks communicate over ``interface``.

    ``rendezvous``: if all ranks are on one machine, the path of a file, so that no rank has to listen on a
    port. Otherwise, the address that ``listen`` returned on the first rank. ``device``: the rank's torch
    device.
    """
    timeout, stores = timedelta(seconds=SECONDS), cast("Any", dist)
    for name in INTERFACE_VARIABLES:
        os.environ.setdefault(name, interface.name)
    os.environ.setdefault("VLLM_HOST_IP", interface.address)
    if rendezvous.startswith("/"):
        folder = Path(rendezvous).parent
        for watchdog_process in beside.watched:
            # on a machine without the driver, no other process would remove the folder
            watchdog_process.remove_in_the_end(folder)
        with contextlib.suppress(FileExistsError):
            private.create(folder.parent)
        private.share(folder)
        store: Any = stores.FileStore(rendezvous, ranks)
    else:
        host, _, port = rendezvous.rpartition(":")
        # torch itself would listen on all interfaces
        listener = _listening.pop().detach() if rank == 0 else None
        store = stores.TCPStore(host, int(port), ranks, rank == 0, timeout=timeout, master_listen_fd=listener)
    store.set_timeout(timeout)
    backend = backend_of(exchange_texts(store, rank, ranks, gpu())) if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def group_of_threads(store: Any, rank: int, ranks: int) -> Any:
    """Return a gloo group for ranks that are threads of this process.

    ``store``: a torch HashStore shared by the ranks. The group adds numbers in the same order as a gloo group
    of processes. It isn't torch's default group, because a process can have only one.
    """
    gloo: Any = cast("Any", dist).ProcessGroupGloo
    options = torch_private.gloo_options(LOOPBACK.address, timedelta(seconds=SECONDS))
    return gloo(store, rank, ranks, options)


def gpu() -> str:
    """Return a name for this rank's GPU that is unique across all machines."""
    return f"{machine()} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def exchange_texts(store: Any, rank: int, ranks: int, text: str) -> list[str]:
    """Exchange one string per rank through a torch store. Return every rank's string, in rank order."""
    store.set(f"rlflow/{rank}", text)
    return [store.get(f"rlflow/{other}").decode() for other in range(ranks)]


def backend_of(devices: Sequence[str]) -> str:
    """Return the torch backend for a group: NCCL for GPU tensors and gloo for CPU tensors.

    ``devices``: each rank's GPU name. If ranks share a GPU, gloo is used for both, because NCCL needs one GPU
    per rank.
    """
    return "cpu:gloo,cuda:nccl" if len(set(devices)) == len(devices) else "gloo"
