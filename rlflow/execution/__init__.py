"""Run nodes of a flow. Eager flows and compiled plans use the same operations.

This package holds the engine of one process, the executor with its queues and column store, sampling ahead of
training, node metrics, and the memory of models. `rlflow.cluster` uses Ray, `rlflow.runs` writes files and
checkpoints, and `rlflow.compiler.scheduler` decides which node may start.
"""
