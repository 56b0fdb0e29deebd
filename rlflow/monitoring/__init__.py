"""Show and record runs, and read the records back for the commands that display them.

This package contains the reporters, the live view, trackers, status and notes, and what `rlflow runs`,
`show`, `watch` and `doctor` print. It masks secrets in all output. Metrics are computed in `rlflow.execution`
and `rlflow.runs.records`, and `rlflow.cluster.health` tracks the health of workers.
"""
