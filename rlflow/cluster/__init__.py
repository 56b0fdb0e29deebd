"""Graphs on pools of Ray workers; the only package that imports Ray.

Here: jobs of one's own (`Job`), splitting rows over ranks, calls and their messages, columns that stay on
workers, weights between pools, watching workers. Not here: what a call computes (each worker has an engine of
`rlflow.execution`), when a run goes back (`rlflow.runs.recovery`).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# a call after the run's Ray has ended would otherwise start another, which listens on every interface; Ray
# reads it when it is imported
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

if TYPE_CHECKING:
    from rlflow.cluster.job.futures import gather, wait
    from rlflow.cluster.job.here import Here, here
    from rlflow.cluster.job.job import Job
    from rlflow.cluster.job.job_roles import Group
    from rlflow.cluster.rpc.pool import Future

_LAZY = {
    "Job": "job.job",
    "Group": "job.roles",
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
