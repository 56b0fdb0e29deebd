"""The workers of a run whose ranks are threads of its own process: none of them dies alone, so none is
watched or started anew."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from rlflow.author.flow import Flow
from rlflow.cluster.rpc import thread_pool
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.replies import of_answer
from rlflow.cluster.setup import Setup
from rlflow.cluster.worker import Worker, own_thread
from rlflow.errors import PlanError, RemoteError

if TYPE_CHECKING:
    from rlflow.cluster.health.monitor import Death

CLOSED_SECONDS = 5.0  # how long workers may take to end the processes of their rewards
ENDING_SECONDS = 0.5  # how long calls may take to end; a longer call may be waiting for a rank that failed


@dataclass
class ThreadFleet:
    """All pools of a run, in threads of this process."""

    flow: Flow
    setups: Mapping[str, list[Setup]]  # pool → setup of each rank
    loading: float  # seconds that loading models may take
    pools: dict[str, Pool[Worker]] = field(default_factory=dict)

    def start(self) -> None:
        """Make all workers side by side, and wait until they have loaded. Raises PlanError if a rank fails to
        load, with its error."""
        self._threads = torch.get_num_threads()
        for name, ranks in self.setups.items():
            store = cast(Any, dist).HashStore()
            self.pools[name] = pool = thread_pool.thread_pool(name, len(ranks))
            thread_pool.make(pool, own_thread, [(of_answer(setup), self.flow, store) for setup in ranks])
        try:
            for future in [pool.made(self.loading) for pool in self.pools.values()]:
                future.result()
        except RemoteError as error:
            raise PlanError.of(
                "worker-load",
                "a rank did not load its models",
                found=str(error),
                expected=f"all ranks there within {self.loading:g} s",
                remedy="the same without --pools shows where it fails",
            ) from error

    def stop(self) -> None:
        """End what the ranks have started, and their threads."""
        closing = [
            pool.call(Worker.close, seconds=CLOSED_SECONDS, group="control") for pool in self.pools.values()
        ]
        for future in closing:
            with contextlib.suppress(RemoteError):
                future.result()
        if not thread_pool.close(*self.pools.values(), seconds=ENDING_SECONDS):
            thread_pool.forget(*self.pools.values())
            thread_pool.close(*self.pools.values())
        torch.set_num_threads(self._threads)

    def unwatch(self) -> None:
        """Do nothing, since nothing is watched."""

    def found(self, seconds: float) -> Death | None:
        """None: no rank dies alone."""
        return None

    def lost(self) -> str | None:
        """None: what dies takes the whole process with it."""
        return None

    def restart(self, lost: str) -> list[str]:
        """Raises RemoteError: this is never asked for, since no rank is found dead."""
        raise RemoteError(f"the ranks of '{lost}' are threads of this process, which cannot be started anew")
