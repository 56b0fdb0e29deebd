"""The torch group of a pool's ranks."""

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

from rlflow.interfaces import Interface
from rlflow.reshard.segment import machine
from rlflow.watchdog import beside, private

TALKING = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what libraries read an interface's name from
LOOPBACK = Interface("lo", "127.0.0.1")
SECONDS = 1800.0  # how long a collective may wait for the slowest rank


_listening: list[socket.socket] = []  # of the first rank, until the others may come


def listen(interface: Interface) -> str:
    """Where the ranks of a pool on several machines are to meet: an address of this process, which is the first of them, at a port that
    the kernel chooses. It is known to who is told, but to no secret: who reaches the interface and finds the port can speak there."""
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    _listening[:] = [socket.create_server((interface.address, 0), family=family)]
    return f"{interface.address}:{_listening[0].getsockname()[1]}"


def join(meeting: str, rank: int, ranks: int, device: str, interface: Interface = LOOPBACK) -> None:
    """Make torch's default group, whose members talk over ``interface``. meeting: of ranks on one machine a file, so that nothing listens,
    of others the first one's address."""
    timeout, stores = timedelta(seconds=SECONDS), cast(Any, dist)
    for name in TALKING:
        os.environ.setdefault(name, interface.name)
    os.environ.setdefault("VLLM_HOST_IP", interface.address)
    if meeting.startswith("/"):
        folder = Path(meeting).parent
        for dog in beside.watched:
            dog.remove_in_the_end(folder)  # on a machine that is not the driver's nobody else does
        with contextlib.suppress(FileExistsError):
            private.create(folder.parent)
        private.share(folder)
        store: Any = stores.FileStore(meeting, ranks)
    else:
        host, _, port = meeting.rpartition(":")
        own = _listening.pop().detach() if rank == 0 else None  # torch would listen on all interfaces
        store = stores.TCPStore(host, int(port), ranks, rank == 0, timeout=timeout, master_listen_fd=own)
    store.set_timeout(timeout)
    backend = backend_of(told(store, rank, ranks, gpu())) if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def gpu() -> str:
    """This rank's GPU, by a name that no other has, be it on another machine."""
    return f"{machine()} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def told(store: Any, rank: int, ranks: int, own: str) -> list[str]:
    """What each rank tells the others; it waits for all of them."""
    store.set(f"rlflow/{rank}", own)
    return [store.get(f"rlflow/{each}").decode() for each in range(ranks)]


def backend_of(devices: Sequence[str]) -> str:
    """NCCL for what lies on the GPUs, gloo for what the ranks' hosts tell each other; gloo for both where ranks share a GPU, since NCCL
    wants one for each."""
    return "cpu:gloo,cuda:nccl" if len(set(devices)) == len(devices) else "gloo"
