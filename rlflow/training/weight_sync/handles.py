"""Share GPU memory between processes on one machine (CUDA IPC). Each rank packs its messages into a buffer on
its own device, and the other ranks copy directly from this buffer, whether on the same device or another.

torch opens the buffers of other processes, as ``torch.multiprocessing`` does for tensors. A buffer can be
freed once its owner and everyone who opened it have closed it, or when its owner's process ends. torch does
so when it closes another buffer or runs short of memory. It counts the openers in a small file in /dev/shm
that the last process removes. If all processes are killed, this file stays.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing  # makes ForkingPickler send handles of memory instead of its contents
from pydantic import TypeAdapter
from torch import Tensor

from rlflow.author import torch_private
from rlflow.errors import PlanError
from rlflow.training.weight_sync.exchange import TEXT, exchange
from rlflow.training.weight_sync.segment import HEAD, Segment, check_machines, machine

# machine, key for the exchange of handles, and problem ("" if there is none)
OFFER = TypeAdapter(tuple[str, str, str])


class Handles(Segment):
    """A transport through shared GPU memory.

    group: the ranks, all on one machine; collectives use gloo on the CPU. device: where this rank's buffer
    is.

    Devices run asynchronously, so each rank waits for its own device before it tells other ranks that it has
    packed or read a bucket.
    """

    name = "handles"

    def __init__(self, device: str | torch.device, group: dist.ProcessGroup | None = None) -> None:
        super().__init__("", group)
        self.device = torch.device(device)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Allocate this rank's buffers and open those of the other ranks.

        send: bytes of the largest outgoing bucket. slots: how many buckets the buffer holds. Raises PlanError
        on all ranks if they are on several machines, or if a buffer can't be created or opened.
        """
        self._slots = slots
        size = HEAD + slots * (-(-send // HEAD) * HEAD)
        memory, handles, problem = self._own_buffer(size)
        offers = exchange((machine(), secrets.token_hex(8), problem), OFFER, self.group)
        check_machines(where for where, _, _ in offers)
        check_shared({rank: problem for rank, (_, _, problem) in enumerate(offers)})
        problem = self._opened(memory, self._swapped(handles, offers[0][1]))
        try:
            check_shared(dict(enumerate(exchange(problem, TEXT, self.group))))
        except PlanError:
            self.close()
            raise

    def _own_buffer(self, size: int) -> tuple[Tensor | None, list[bytes], str]:
        """Return this rank's buffer of ``size`` bytes, a handle of it for each rank, and a description of the
        problem, or "" if there is none. Each rank gets its own handle because torch counts openers."""
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
        # a torch build without CUDA raises an AssertionError
        except (RuntimeError, AssertionError, OSError) as error:
            return None, [], _line(error)

    def _swapped(self, handles: list[bytes], name: str) -> list[bytes]:
        """Send each rank its handle, and return the handles for this rank in rank order.

        Handles are pickles, so they are exchanged through the group's rendezvous store, which on one machine
        is a file that only this user can access. Sockets are open to other users.
        """
        store = torch_private.default_store()
        for rank, handle in enumerate(handles):
            store.set(f"rlflow/handles/{name}/{self.rank}/{rank}", handle)
        return [store.get(f"rlflow/handles/{name}/{rank}/{self.rank}") for rank in range(self.ranks)]

    def _opened(self, memory: Tensor | None, handles: list[bytes]) -> str:
        """Open the buffers of all other ranks. Returns a description of the problem, or "" if there is
        none."""
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
        """Wait until all ranks have packed the bucket, after which it can be read."""
        self._settle()
        super().wait()

    def release(self) -> None:
        """Wait until all ranks have read the bucket, after which its memory can be reused."""
        self._settle()
        super().release()

    def _settle(self) -> None:
        """Wait until this rank's device has finished packing and reading."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Free the shared memory."""
        super().close()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def check_shared(problems: Mapping[int, str]) -> None:
    """Raise PlanError if any rank can't share GPU memory. ``problems`` has a description of each rank's
    problem, or "" if there is none."""
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
    """Return the first line of an error's message. CUDA's errors have many lines."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
