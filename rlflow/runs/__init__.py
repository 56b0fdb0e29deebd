"""A run: its folder, its loop over iterations, its records and messages, its end, and how it is resumed.

This package prepares, evaluates, recovers and resumes runs, and records their dependencies.
`rlflow.execution` executes nodes, `rlflow.checkpoints` has the checkpoint format, and `rlflow.monitoring` has
the displays.
"""
