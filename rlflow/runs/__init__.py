"""A run: its folder, its loop over iterations, its records and messages, its end, and how it is resumed.

This package prepares and evaluates runs, recovers them, resumes them and records their dependencies. Nodes
are executed in `rlflow.execution`, the checkpoint format is in `rlflow.checkpoints`, displays are in
`rlflow.monitoring`.
"""
