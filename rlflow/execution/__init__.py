"""Run the nodes of a flow. Eager flows and compiled plans use the same operations.

This package has the engine of one process, the executor with its queues and column store, sampling ahead of
training, metrics of nodes, and offloading of models. `rlflow.cluster` runs nodes on Ray, `rlflow.runs` writes
files and checkpoints, and `rlflow.compiler.scheduler` decides which node may start.
"""
