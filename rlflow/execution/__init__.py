"""Runs the nodes of a flow. Eager flows and compiled plans use the same operations.

This package contains the single-process engine, the executor with its queues and column store, sampling ahead
of training, node metrics, and model offloading. `rlflow.cluster` runs nodes on Ray, `rlflow.runs` writes
files and checkpoints, and `rlflow.compiler.scheduler` decides which nodes may start.
"""
