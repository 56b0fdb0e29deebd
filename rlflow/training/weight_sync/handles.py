"""Memory of GPUs shared between the processes of one machine (CUDA IPC): each rank packs into a buffer of its
own device, and the others copy straight out of it, on the same device or from one to another.

What opens a buffer of another process is torch's own, as ``torch.multiprocessing`` sends tensors. A buffer is
free when its owner and all who opened it have closed it, which torch looks for when it closes another, or
when memory is short; and with its owner's process. torch counts them in a small file of /dev/shm, which goes
with the last of them, and stays where all are killed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler to send memory, where it would send what is in it
from pydantic import TypeAdapter
from torch import Tensor

from rlflow.errors import PlanError
from rlflow.training.weight_sync.exchange import TEXT, exchange
from rlflow.training.weight_sync.segment import HEAD, Segment, check_machines, machine

# machine, a name for the exchange of handles, and what is wrong, if anything is
LENT = TypeAdapter(tuple[str, str, str])


class Handles(Segment):
    """group: the ranks, all on one machine, with gloo for what lies on the host. device: where their buffers
    lie.

    A device runs behind its host. So a rank waits for its own device before it tells the others that a bucket
    is packed, or read.
    """

    name = "handles"

    def __init__(self, device: str | torch.device, group: dist.ProcessGroup | None = None) -> None:
        super().__init__("", group)
        self.device = torch.device(device)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Raises PlanError, on all ranks alike, where they are on several machines, or a buffer cannot be
        made or opened."""
        self._slots = slots
        size = HEAD + slots * (-(-send // HEAD) * HEAD)
        memory, handles, problem = self._lent(size)
        offers = exchange((machine(), secrets.token_hex(8), problem), LENT, self.group)
        check_machines(where for where, _, _ in offers)
        check_shared({rank: problem for rank, (_, _, problem) in enumerate(offers)})
        problem = self._opened(memory, self._swapped(handles, offers[0][1]))
        try:
            check_shared(dict(enumerate(exchange(problem, TEXT, self.group))))
        except PlanError:
            self.close()
            raise

    def _lent(self, size: int) -> tuple[Tensor | None, list[bytes], str]:
        """A buffer, and a handle of it for each rank, since each that opens one is counted; or what is
        wrong."""
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            return (
                memory,
                [
                    bytes(ForkingPickler.dumps(memory)) if rank != self.rank else b""
                    for rank in range(self.ranks)
                ],
                "",
            )
        # an assertion is what a build without CUDA says
        except (RuntimeError, AssertionError, OSError) as error:
            return None, [], _line(error)

    def _swapped(self, handles: list[bytes], name: str) -> list[bytes]:
        """The handle for this rank from each rank. Handles are pickles, and so go through the store in which
        the group has met: on one machine a file of this user alone, where sockets are open to others."""
        store: Any = cast(Any, dist).distributed_c10d._get_default_store()
        for rank, handle in enumerate(handles):
            store.set(f"rlflow/handles/{name}/{self.rank}/{rank}", handle)
        return [store.get(f"rlflow/handles/{name}/{rank}/{self.rank}") for rank in range(self.ranks)]

    def _opened(self, memory: Tensor | None, handles: list[bytes]) -> str:
        """Open the buffers of all others; what is wrong, if anything is."""
        assert memory is not None
        try:
            self._memory = [
                memory if rank == self.rank else ForkingPickler.loads(handle)
                for rank, handle in enumerate(handles)
            ]
        except (RuntimeError, OSError) as error:
            return _line(error)
        return ""

    def wait(self) -> None:
        """Wait until the messages of the bucket have arrived."""
        self._settle()
        super().wait()

    def release(self) -> None:
        """Wait until all ranks have read the bucket, so that its memory can be written again."""
        self._settle()
        super().release()

    def _settle(self) -> None:
        """Wait until this rank's device has packed and read all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give the shared memory back."""
        super().close()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def check_shared(problems: Mapping[int, str]) -> None:
    """Raise PlanError where a rank cannot share memory. problems: rank → message, empty where nothing is
    wrong."""
    lines = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if lines:
        raise PlanError.of(
            "reshard-handles",
            "these processes cannot share the memory of their GPUs",
            found="; ".join(lines),
            expected="processes that may open each other's memory (CUDA IPC), and room for two buckets "
            "of each rank",
            remedy="--weights alltoall",
        )


def _line(error: Exception) -> str:
    """The first line of what a library says, of which CUDA's has many."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
