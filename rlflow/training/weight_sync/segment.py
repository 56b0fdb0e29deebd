"""Shared memory of one machine: each rank packs into a segment of its own, and the others copy straight out
of it.

What moves is written once and read once. The files are unlinked as soon as all ranks have opened them, so
that memory goes with its last process, however that ends. Only a death within ``open`` can leave a file: its
name carries the run and the process with its start time, and the next ``open`` of the run removes what
belongs to no living process.
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

HEAD = 64  # bytes before the slots: of each, the version of what is in it
ROOT = Path("/dev/shm")
FILE = TypeAdapter(tuple[str, int, str, str])  # path, bytes, machine, and what is wrong, if anything is


class SharedFile(NamedTuple):
    """A file of shared memory: plain numbers and text, which travel to whoever opens it."""

    path: str
    size: int  # bytes

    @classmethod
    def named(cls, run: str, size: int, root: Path = ROOT) -> SharedFile:
        """A file of this process that is not there yet. Those that the dead of this run have left are
        removed."""
        name = re.sub(r"[^A-Za-z0-9]", "-", run)
        sweep(name, root)
        return cls(str(root / f"rlflow-{name}-{secrets.token_hex(4)}-{Process.this().tag()}"), size)

    def create(self) -> str:
        """Make it for this user alone, its memory taken at once: a full disk of shared memory would else kill
        the process that writes. What is wrong, if anything is, since all ranks have to know."""
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
        """[size] uint8, shared with all who open it."""
        return torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)

    def hide(self) -> None:
        """All who need it have it open: its memory goes with the last of them, however that ends."""
        Path(self.path).unlink(missing_ok=True)


class Segment:
    """run: names the files; group: the ranks, all on one machine, over gloo (None: the default group). A
    barrier of the group stands between packing and copying, and its timeout is the deadline."""

    name = "segment"
    copies = False

    def __init__(self, run: str, group: dist.ProcessGroup | None = None, root: Path = ROOT) -> None:
        self.run, self.group, self.root, self.received = run, group, root, 0
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._memory: list[Tensor] = []
        self._slots = 0
        self._last: tuple[int, Round] | None = None
        self._version = -1
        self._heard: dict[int, int] = {}

    # -- buffers
    # --------------------------------------------------------------------------------------------------------

    def open(self, send: int, receive: int, slots: int) -> None:
        """Raises PlanError where the ranks are on several machines, or shared memory is too small."""
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
        """The memory into which this rank packs its messages of a slot, uint8. It is shared, and receivers
        read it there."""
        return self._slot(self.rank, slot)

    def inbox(self, slot: int, bucket: Round) -> dict[int, Tensor]:
        """The messages of a bucket by sender, uint8."""
        sizes = zip(bucket.offsets, bucket.received, strict=True)
        return {
            peer: self._slot(peer, slot)[start : start + size]
            for peer, (start, size) in enumerate(sizes)
            if size
        }

    # -- a transfer
    # --------------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Begin a transfer of weights of this version."""
        self._version, self._heard = version, {}

    def start(self, slot: int, bucket: Round) -> None:
        """Stamp the packed bucket with its version: shared memory needs no sending, and others read it after
        ``wait``. The version lies with the slot, since a rank that is ahead may have begun the next transfer
        while others still read this one."""
        self._stamp(self.rank, slot).fill_(self._version)
        self._last = slot, bucket

    def wait(self) -> None:
        """Wait until all ranks have packed, and note the version that each sender has stamped on its
        message."""
        dist.barrier(self.group)
        assert self._last is not None
        messages = self.inbox(*self._last)
        self._heard |= {peer: int(self._stamp(peer, self._last[0])) for peer in messages}
        self.received += sum(message.numel() for message in messages.values())

    def release(self) -> None:
        """Wait until all ranks have read the bucket, so that its memory can be written again."""
        dist.barrier(self.group)

    def versions(self) -> dict[int, int]:
        """The version of the weights that each sender stamped on its messages."""
        return self._heard

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of numbers over all ranks."""
        return summed(numbers, self.group, torch.device("cpu"))

    def close(self) -> None:
        """Give the shared memory back."""
        self._memory = []


def machine() -> str:
    """A text that is equal for two processes exactly where they can share memory."""
    return f"{socket.gethostname()} {boot()}"


def check_machines(machines: Iterable[str]) -> None:
    """Raises PlanError for ranks on several."""
    distinct = set(machines)
    if len(distinct) > 1:
        raise PlanError.of(
            "reshard-machines",
            "shared memory reaches no other machine",
            found=f"ranks on {sorted({name.split()[0] for name in distinct})}",
            expected="all ranks on one machine",
            remedy="--weights auto, or alltoall",
        )


def check_room(problems: Mapping[str, str]) -> None:
    """Raise PlanError where there is no room for shared memory. problems: process → message, empty where
    nothing is wrong."""
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
    """Remove the files that dead processes of this run have left in ``root``. Gives their paths. A file of a
    process that cannot be seen from here, in another container, stays."""
    owners = {path: Process.of_tag(path.name.rpartition("-")[2]) for path in root.glob(f"rlflow-{run}-*-*")}
    abandoned = [path for path, owner in owners.items() if owner is not None and owner.alive() is False]
    for path in abandoned:
        with contextlib.suppress(OSError):
            path.unlink()
    return abandoned
