"""Ranks that share an engine, each with its own process and a part of every weight."""

from __future__ import annotations

import glob
import hashlib
import importlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.errors import PlanError
from rlflow.training.weight_sync.exchange import TEXT, exchange

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class EngineRank:
    """This rank's place in the pool. The ranks [k·size, (k+1)·size) share engine k, with the parts of the
    model in this order. Engines are independent of each other."""

    rank: int  # of this process in its pool
    ranks: int  # of the pool
    size: int  # ranks that share an engine
    run: str  # equal on all ranks of the pool, and different in other pools

    @staticmethod
    def of_pool(size: int) -> EngineRank:
        """Return this rank's place among the ranks of torch's default group. Every rank of the pool must call
        it. Raises PlanError if engines of that size do not fill the pool."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        if ranks % size:
            raise PlanError.of(
                "tensor-parallel",
                f"engines of {size} ranks do not fill a pool of {ranks}",
                found=f"--tensor_parallel {size}",
                expected="a number that divides the ranks of the pool",
                remedy="change --pools or --ROLE.tensor_parallel",
            )
        name = secrets.token_hex(8)
        return EngineRank(rank, ranks, size, exchange(name, TEXT)[0] if ranks > 1 else name)

    @property
    def launcher(self) -> str:
        """vLLM's executor: for one process, or for one of several processes that were started elsewhere."""
        return "external_launcher" if self.ranks > 1 else "uni"

    def variables(self, device: str) -> dict[str, str]:
        """Return the environment variables that vLLM's external launcher reads."""
        if self.ranks == 1:
            return {}
        index = torch.cuda.current_device() if device == "cuda" else self.rank
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(index)}

    def check_group(self) -> None:
        """Raise PlanError if this process already shared an engine with other ranks. vLLM keeps one set of
        groups per process and reuses it without checking."""
        first = self.rank - self.rank % self.size
        grouped, own = _state().get_tp_group().ranks, list(range(first, first + self.size))
        if grouped != own:
            raise PlanError.of(
                "rank-order",
                "vLLM uses the same ranks for all engines of a process",
                found=f"one of ranks {grouped}",
                expected=f"ranks {own}",
                remedy="use one --ROLE.generator.tensor_parallel for all roles of the pool",
            )

    def name_segments(self) -> None:
        """Give this pool's shared memory its own names. vLLM's names contain only ranks, so two pools on a
        machine would collide, or a pool and the remains of a dead one."""
        communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
        communicator._CPUSHMDistributed.make_group_name = staticmethod(self._segment)

    def _segment(self, communicator: Any) -> str:
        return f"rlflow-{self.run}-{communicator.unique_name.replace(':', '-')}-{'-'.join(map(str, communicator.ranks))}"

    def drop_segments(self) -> None:
        """Remove the names once all ranks have joined. The memory is freed with the last rank, even after a
        crash."""
        if self.size > 1:
            dist.barrier()
            _drop_queues()
        for path in glob.glob(f"{SHARED_MEMORY}/*rlflow-{self.run}-*"):
            Path(path).unlink(missing_ok=True)

    def alike(self, own: object) -> bool:
        """Return True if all ranks of this engine have an equal value, compared by its repr. Waits for all of
        these ranks."""
        if self.size == 1:
            return True
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        return set(exchange(digest, TEXT, _state().get_tp_group().cpu_group)) == {digest}


def _state() -> Any:
    """Return vLLM's groups; a process has one set of them."""
    return importlib.import_module("vllm.distributed.parallel_state")


def _drop_queues() -> None:
    """Unlink the memory and sockets of the queues with which vLLM's groups send objects. The rank that made a
    queue unlinks it at its end, but workers are killed."""
    for queue in (
        group.mq_broadcaster for reference in _state()._groups.values() if (group := reference()) is not None
    ):
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
            for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
                if address is not None:
                    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
