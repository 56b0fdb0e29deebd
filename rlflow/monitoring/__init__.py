"""Watch a run: its output while it runs, its records for other programs, and the commands that read these
records.

Here: reporters, the live view, trackers, status and notes, `rlflow runs`, `show`, `watch` and `doctor`, and
the masking of secrets in their output. Not here: computing metrics (`rlflow.execution`,
`rlflow.runs.records`), and the health of workers (`rlflow.cluster.health`).
"""
