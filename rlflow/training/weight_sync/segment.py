"""A transport through shared memory on one machine. Each rank packs its messages into its own segment, and
the other ranks copy directly from it.

Each message is written once and read once. Files are unlinked as soon as all ranks have opened them, so their
memory is freed when the last process ends, even after a crash. A file can be left behind only if a process
dies during ``open``. File names contain the run, the process and its start time, and the next ``open`` in the
same run removes the files of dead processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from rlflow.errors import PlanError
from rlflow.processes.process import Process, boot
from rlflow.training.weight_sync.exchange import exchange
from rlflow.training.weight_sync.transfer_plan import Round
from rlflow.training.weight_sync.transport import summed

HEAD = 64  # bytes before the slots: the version of each slot's content
ROOT = Path("/dev/shm")
FILE = TypeAdapter(tuple[str, int, str, str])  # path, bytes, machine, problem ("" if there is none)


class SharedFile(NamedTuple):
    """The path and size of a file in shared memory, which processes can send to each other."""

    path: str
    size: int  # bytes

    @classmethod
    def named(cls, run: str, size: int, root: Path = ROOT) -> SharedFile:
        """Choose a new file name for this process, without creating the file. Removes files of this run's
        dead processes."""
        name = re.sub(r"[^A-Za-z0-9]", "-", run)
        sweep(name, root)
        return cls(str(root / f"rlflow-{name}-{secrets.token_hex(4)}-{Process.this().tag()}"), size)

    def create(self) -> str:
        """Create the file, accessible only to this user, and allocate its memory. Without the allocation, a
        full /dev/shm would kill the process that writes.

        Returns a description of the problem, or "" if there is none. Nothing is raised, because all ranks
        have to learn about the problem.
        """
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(handle, 0, self.size)
            finally:
                os.close(handle)
        except OSError as problem:
            return f"{self.size} bytes in {os.path.dirname(self.path)}: {problem.strerror}"
        return ""

    def opened(self) -> Tensor:
        """Return the file's memory, uint8 [size], which is shared by all processes that open the file."""
        return torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)

    def hide(self) -> None:
        """Unlink the file. Call this once all readers have opened it. Its memory is freed when the last
        process using it ends."""
        Path(self.path).unlink(missing_ok=True)


class Segment:
    """A transport through shared memory.

    run: the name of the run, which becomes part of the file names. group: the gloo group of the ranks, which
    must all be on one machine, or None for the default group. A barrier of the group separates packing from
    copying, and the group's timeout limits each wait.
    """

    name = "segment"
    copies = False

    def __init__(self, run: str, group: dist.ProcessGroup | None = None, root: Path = ROOT) -> None:
        self.run, self.group, self.root, self.received = run, group, root, 0
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory: list[Tensor] = []
        self._slots = 0
        self._last: tuple[int, Round] | None = None
        self._version = -1
        self._stamped: dict[int, int] = {}

    # -- buffers
    # --------------------------------------------------------------------------------------------------------

    def open(self, send: int, receive: int, slots: int) -> None:
        """Create this rank's file and open those of all ranks. Raises PlanError if the ranks are on several
        machines, or if there isn't enough shared memory."""
        self._slots = slots
        room = -(-send // HEAD) * HEAD
        file = SharedFile.named(self.run, HEAD + slots * room, self.root)
        try:
            problem = file.create()
            offers = exchange((*file, machine(), problem), FILE, self.group)
            check_machines(where for _, _, where, _ in offers)
            check_room({f"rank {rank}": what for rank, (_, _, _, what) in enumerate(offers)})
            self._memory = [SharedFile(path, size).opened() for path, size, _, _ in offers]
            dist.barrier(self.group)
        finally:
            file.hide()

    def _slot(self, rank: int, slot: int) -> Tensor:
        memory = self._memory[rank]
        room = (memory.numel() - HEAD) // self._slots
        return memory[HEAD + slot * room : HEAD + (slot + 1) * room]

    def _stamp(self, rank: int, slot: int) -> Tensor:
        return self._memory[rank][8 * slot : 8 * slot + 8].view(torch.int64)

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs the bucket in a slot, uint8. The other ranks read it
        there."""
        return self._slot(self.rank, slot)

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """Return the bucket's messages to this rank, uint8, by sender."""
        sizes = zip(bucket.offsets, bucket.received, strict=True)
        return {
            peer: self._slot(peer, slot)[start : start + size]
            for peer, (start, size) in enumerate(sizes)
            if size
        }

    # -- a transfer
    # --------------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Begin a transfer of weights with this version."""
        self._version, self._stamped = version, {}

    def start(self, slot: int, bucket: Round) -> None:
        """Mark the packed bucket with the version of its weights. Nothing is sent; the other ranks read the
        shared memory after ``wait``.

        The version is stored in the slot, because a fast rank may begin the next transfer while others are
        still reading this bucket.
        """
        self._stamp(self.rank, slot).fill_(self._version)
        self._last = slot, bucket

    def wait(self) -> None:
        """Wait until all ranks have packed the bucket, and record the version of each sender's message."""
        dist.barrier(self.group)
        assert self._last is not None
        messages = self.inbox(*self._last)
        self._stamped |= {peer: int(self._stamp(peer, self._last[0])) for peer in messages}
        self.received += sum(message.numel() for message in messages.values())

    def release(self) -> None:
        """Wait until all ranks have read the bucket, after which its memory can be reused."""
        dist.barrier(self.group)

    def versions(self) -> dict[int, int]:
        """Return the version of each sender's messages since ``begin``."""
        return self._stamped

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of ``numbers`` over all ranks."""
        return summed(numbers, self.group, torch.device("cpu"))

    def close(self) -> None:
        """Free the shared memory."""
        self._memory = []


def machine() -> str:
    """Return an id of this machine. Two processes have the same id if and only if they can share memory."""
    return f"{socket.gethostname()} {boot()}"


def check_machines(machines: Iterable[str]) -> None:
    """Raise PlanError if the ids returned by ``machine`` differ, which means that the ranks are on several
    machines."""
    distinct = set(machines)
    if len(distinct) > 1:
        raise PlanError.of(
            "reshard-machines",
            "shared memory does not work across machines",
            found=f"ranks on {sorted({name.split()[0] for name in distinct})}",
            expected="all ranks on one machine",
            remedy="--weights auto, or alltoall",
        )


def check_room(problems: Mapping[str, str]) -> None:
    """Raise PlanError if there isn't enough shared memory. ``problems`` has a description of each process's
    problem, or "" if there is none."""
    lines = [f"{who}: {problem}" for who, problem in problems.items() if problem]
    if lines:
        raise PlanError.of(
            "reshard-memory",
            "shared memory is too small for a bucket",
            found="; ".join(lines),
            expected="room for two buckets of each rank",
            remedy="make /dev/shm larger (docker run --shm-size), or buckets smaller",
        )


def sweep(run: str, root: Path = ROOT) -> list[Path]:
    """Remove files of this run's dead processes from ``root``, and return their paths. Files from other
    containers stay, because their processes may still be running."""
    owners = {path: Process.of_tag(path.name.rpartition("-")[2]) for path in root.glob(f"rlflow-{run}-*-*")}
    abandoned = [path for path, owner in owners.items() if owner is not None and owner.alive() is False]
    for path in abandoned:
        with contextlib.suppress(OSError):
            path.unlink()
    return abandoned
