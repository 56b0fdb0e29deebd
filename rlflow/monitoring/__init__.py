"""Watching a run: what it says while it goes, what it leaves for others to read, and what reads that.

Here: reporters, the live view, trackers, status and notes, `rlflow runs`, `show`, `watch` and `doctor`,
secrets kept out of all of it. Not here: metrics themselves (`rlflow.execution`, `rlflow.runs.records`),
whether workers live (`rlflow.cluster.health`).
"""
