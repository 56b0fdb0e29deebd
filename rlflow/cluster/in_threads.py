"""The workers of a run whose ranks are threads of the run's own process.

A rank in a thread can't die alone, so these ranks are neither watched nor restarted.
"""

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

CLOSED_SECONDS = 5.0  # time limit for workers to end the processes of their rewards
ENDING_SECONDS = 0.5  # time limit for calls to end; a longer call may wait for a failed rank


@dataclass
class ThreadWorkers:
    """All pools of a run whose ranks are threads of this process."""

    flow: Flow
    setups: Mapping[str, list[Setup]]  # pool → setup of each rank
    loading: float  # time limit to load models, in seconds
    pools: dict[str, Pool[Worker]] = field(default_factory=dict)

    def start(self) -> None:
        """Start all pools in parallel, and wait until their models are loaded.

        If a rank fails to load its models, raises PlanError with that rank's error.
        """
        self._threads = torch.get_num_threads()
        for name, ranks in self.setups.items():
            store = cast("Any", dist).HashStore()
            self.pools[name] = pool = thread_pool.thread_pool(name, len(ranks))
            thread_pool.make(pool, own_thread, [(of_answer(setup), self.flow, store) for setup in ranks])
        try:
            for future in [pool.made(self.loading) for pool in self.pools.values()]:
                future.result()
        except RemoteError as error:
            raise PlanError.of(
                "worker-load",
                "a rank could not load its models",
                found=str(error),
                expected=f"all ranks loaded within {self.loading:g} s",
                remedy="run the same command without --pools to see where loading fails",
            ) from error

    def stop(self) -> None:
        """End the ranks' threads, and the processes that the ranks have started."""
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
        """Do nothing: ranks in threads aren't watched."""

    def found(self, seconds: float) -> Death | None:
        """Return None: a rank in a thread can't die alone."""
        return None

    def lost(self) -> str | None:
        """Return None: if a rank failed, this process would end too."""
        return None

    def restart(self, lost: str) -> list[str]:
        """Raise RemoteError. Recovery never calls this, because ranks in threads are never found dead."""
        raise RemoteError(f"the ranks of '{lost}' are threads of this process and cannot be started again")
