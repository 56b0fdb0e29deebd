"""Graphs on pools of Ray workers; the only package that imports Ray.

Here: splitting rows over ranks, calls and their messages, columns that stay on workers, weights between pools, watching workers.
Not here: what a call computes (each worker has an engine of `rlflow.execution`), when a run goes back (`rlflow.runs.recovery`).
"""

import os

# a call after the run's Ray has ended would otherwise start another, which listens on every interface; Ray reads it when it is imported
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
