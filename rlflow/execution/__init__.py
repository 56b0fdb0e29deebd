"""Run nodes: the same operations serve eager flows and compiled plans.

This package holds the engine of one process, the executor with its queues and column store, sampling ahead of
training, node metrics, and the memory of models. Ray is in `rlflow.cluster`. What a run writes and when it
saves is in `rlflow.runs`. Which node may start is decided in `rlflow.compiler.scheduler`.
"""
