"""The ranks that share an engine. Each is a process that holds a part of every weight."""

from __future__ import annotations

import glob
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.vllm import internals
from rlflow.errors import PlanError
from rlflow.training.weight_sync.exchange import TEXT, exchange

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class EngineRank:
    """This rank's place in its pool.

    Ranks k·size to (k+1)·size - 1 share engine k and hold the parts of the model in this order. Engines are
    independent of each other.
    """

    rank: int  # of this process in its pool
    ranks: int  # of the pool
    size: int  # ranks that share an engine
    run: str  # equal on all ranks of the pool, and different in other pools

    @staticmethod
    def of_pool(size: int) -> EngineRank:
        """Return this rank's place among the ranks of torch's default group, with ``size`` ranks per engine.

        Every rank of the pool must call this. Raises PlanError if the number of ranks isn't a multiple of
        ``size``.
        """
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
        """The name of vLLM's executor: ``uni`` for a single process, ``external_launcher`` for processes
        started elsewhere."""
        return "external_launcher" if self.ranks > 1 else "uni"

    def variables(self, device: str) -> dict[str, str]:
        """Return the environment variables for vLLM's external launcher, or {} for a single process."""
        if self.ranks == 1:
            return {}
        index = torch.cuda.current_device() if device == "cuda" else self.rank
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(index)}

    def check_group(self) -> None:
        """Raise PlanError if this process already shares an engine with a different set of ranks. vLLM has
        one set of process groups per process and reuses it without checking."""
        first = self.rank - self.rank % self.size
        grouped, own = internals.engine_group().ranks, list(range(first, first + self.size))
        if grouped != own:
            raise PlanError.of(
                "rank-order",
                "vLLM uses the same ranks for all engines of a process",
                found=f"one of ranks {grouped}",
                expected=f"ranks {own}",
                remedy="use one --ROLE.generator.tensor_parallel for all roles of the pool",
            )

    def name_segments(self) -> None:
        """Give this pool's shared memory unique names.

        vLLM's own names contain only ranks, so they would collide with those of another pool on this machine,
        or with files left behind by a dead pool.
        """
        internals.name_segments(self._segment)

    def _segment(self, communicator: Any) -> str:
        return f"rlflow-{self.run}-{communicator.unique_name.replace(':', '-')}-{'-'.join(map(str, communicator.ranks))}"

    def drop_segments(self) -> None:
        """Unlink this pool's shared memory once all ranks have opened it. It is freed when the last rank
        ends, even after a crash."""
        if self.size > 1:
            dist.barrier()
            _drop_queues()
        for path in glob.glob(f"{SHARED_MEMORY}/*rlflow-{self.run}-*"):
            Path(path).unlink(missing_ok=True)

    def alike(self, own: object) -> bool:
        """Return True if ``own`` has the same repr on all ranks of this engine. All of them must call this,
        and each waits for the others."""
        if self.size == 1:
            return True
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        return set(exchange(digest, TEXT, internals.engine_group().cpu_group)) == {digest}


def _drop_queues() -> None:
    """Unlink the shared memory and sockets of the queues through which vLLM's groups send objects. The rank
    that created a queue would do so on exit, but workers are killed."""
    for queue in internals.queues():
        if queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
            for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
                if address is not None:
                    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
