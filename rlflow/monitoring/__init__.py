"""Watching a run: its output while it runs, its records for other programs, and the commands that read them.

Here: reporters, the live view, trackers, status and notes, `rlflow runs`, `show`, `watch` and `doctor`,
masking of secrets in all of these. Not here: computing metrics (`rlflow.execution`, `rlflow.runs.records`),
the health of workers (`rlflow.cluster.health`).
"""
