"""Ranks that share an engine, each with a process of its own and a part of every weight."""

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
    """This rank among those of the pool. Of several engines, which know nothing of each other, engine k is
    shared by the ranks [k·size, (k+1)·size). Their parts of the model are in this order."""

    rank: int  # of this process in its pool
    ranks: int  # of the pool
    size: int  # ranks that share an engine
    run: str  # the same on all ranks of the pool, and of no other

    @staticmethod
    def taken(size: int) -> EngineRank:
        """This rank's place among the ranks of torch's default group; every rank of the pool has to call it.
        Raises PlanError where engines of that size do not fill the pool."""
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
        """vLLM's executor: of one process, or of one process among others that were started elsewhere."""
        return "external_launcher" if self.ranks > 1 else "uni"

    def variables(self, device: str) -> dict[str, str]:
        """Environment variables that vLLM's external launcher reads."""
        if self.ranks == 1:
            return {}
        index = torch.cuda.current_device() if device == "cuda" else self.rank
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(index)}

    def check_group(self) -> None:
        """Raises PlanError where this process shared an engine before, with other ranks: a process has one
        set of groups, which vLLM takes as it finds them."""
        first = self.rank - self.rank % self.size
        grouped, own = _state().get_tp_group().ranks, list(range(first, first + self.size))
        if grouped != own:
            raise PlanError.of(
                "rank-order",
                "vLLM shares all engines of a process with the same ranks",
                found=f"one of ranks {grouped}",
                expected=f"ranks {own}",
                remedy="one --ROLE.generator.tensor_parallel for all roles of the pool",
            )

    def name_segments(self) -> None:
        """Let this pool's engines share memory under names of their own. vLLM names it by ranks alone, so
        that two pools on a machine, or one and what a dead one left, meet in it."""
        communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
        communicator._CPUSHMDistributed.make_group_name = staticmethod(self._segment)

    def _segment(self, communicator: Any) -> str:
        return f"rlflow-{self.run}-{communicator.unique_name.replace(':', '-')}-{'-'.join(map(str, communicator.ranks))}"

    def drop_segments(self) -> None:
        """Take the names away once all ranks have joined: the memory lives as long as they do, and nothing is
        left when they die."""
        if self.size > 1:
            dist.barrier()
            _drop_queues()
        for path in glob.glob(f"{SHARED_MEMORY}/*rlflow-{self.run}-*"):
            Path(path).unlink(missing_ok=True)

    def alike(self, own: object) -> bool:
        """Whether all ranks of this engine have the same, of what looks the same where it is; it waits for
        all of them."""
        if self.size == 1:
            return True
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        return set(exchange(digest, TEXT, _state().get_tp_group().cpu_group)) == {digest}


def _state() -> Any:
    """vLLM's groups, of which a process has one set."""
    return importlib.import_module("vllm.distributed.parallel_state")


def _drop_queues() -> None:
    """Unlink the memory and the sockets of the queues by which vLLM's groups send objects. The rank that made
    a queue would unlink it at its end, but workers are killed."""
    for queue in (
        group.mq_broadcaster for reference in _state()._groups.values() if (group := reference()) is not None
    ):
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
            for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
                if address is not None:
                    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
