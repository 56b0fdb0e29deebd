"""`rlflow job`: print how to start a run on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlflow.cluster.submit.kuberay import ray_job
from rlflow.cluster.submit.ray_submit import submission
from rlflow.cluster.submit.skypilot import job_group
from rlflow.cluster.submit.slurm import batch_script
from rlflow.cluster.submit.target import target_of
from rlflow.config.flags import read_flags

FORMS = {"skypilot": job_group, "kuberay": ray_job, "ray": submission, "slurm": batch_script}


def print_job(file: str, arguments: Sequence[str]) -> int:
    """Print the job file or command that starts a file's run on a cluster, and return 0.

    Raises PlanError if the run can't be started there.
    """
    kind, target = target_of(file, read_flags(arguments))
    for line in target.warnings:
        print(line, file=sys.stderr)
    sys.stdout.flush()
    # bypasses the streams guarded by `rlflow.monitoring.secrets`, which would mask the names of secrets
    sys.stdout.buffer.write(FORMS[kind](target).encode())
    sys.stdout.buffer.flush()
    return 0
