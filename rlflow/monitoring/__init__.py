"""Watch runs: display and record a run, and implement the commands that read the records.

The package has the reporters, the live view, trackers, status and notes, `rlflow runs`, `show`, `watch` and
`doctor`, and masks secrets in their output. Metrics are computed in `rlflow.execution` and
`rlflow.runs.records`. The health of workers is in `rlflow.cluster.health`.
"""
