"""Run flows and jobs on pools of Ray workers. No other package imports Ray.

This package splits rows over ranks, calls the workers, keeps columns on them, moves weights between pools and
checks the workers' health. It also runs jobs (`Job`), whose roles are the user's own classes. Each worker
runs its calls with an engine of `rlflow.execution`. `rlflow.runs.recovery` decides when a run recovers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Without this, a call after the run's Ray has ended would start a new Ray that listens on every interface.
# Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

if TYPE_CHECKING:
    from rlflow.cluster.job.futures import gather, wait
    from rlflow.cluster.job.here import Here, here
    from rlflow.cluster.job.job import Job
    from rlflow.cluster.job.job_roles import Group
    from rlflow.cluster.rpc.pool import Future

_LAZY = {
    "Job": "job.job",
    "Group": "job.job_roles",
    "Future": "rpc.pool",
    "gather": "job.futures",
    "wait": "job.futures",
    "Here": "job.here",
    "here": "job.here",
}
__all__ = ["Future", "Group", "Here", "Job", "gather", "here", "wait"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"rlflow.cluster.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rlflow.cluster' has no attribute '{name}'")
