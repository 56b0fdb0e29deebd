"""The torch group of a pool's ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rlflow.reshard.segment import machine
from rlflow.watchdog import beside, private

SECONDS = 1800.0  # how long a collective may wait for the slowest rank


def join(meeting: str, rank: int, ranks: int, device: str) -> None:
    """Make torch's default group. Ranks on one machine meet in a file, so that nothing listens; others at the first one's address."""
    timeout, stores = timedelta(seconds=SECONDS), cast(Any, dist)
    if meeting.startswith("/"):
        folder = Path(meeting).parent
        for dog in beside.watched:
            dog.remove_in_the_end(folder)  # on a machine that is not the driver's nobody else does
        with contextlib.suppress(FileExistsError):
            private.create(folder.parent)
        private.share(folder)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store: Any = stores.FileStore(meeting, ranks)
    else:
        host, _, port = meeting.rpartition(":")
        store = stores.TCPStore(host, int(port), ranks, rank == 0, timeout=timeout)
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
