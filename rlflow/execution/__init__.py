"""Carrying out calls, the same operations for eager flows and for plans.

Here: the engine of one process, the executor with its lanes and store, sampling ahead, metrics of nodes,
memory of models. Not here: Ray (`rlflow.cluster`), what a run writes and when it saves (`rlflow.runs`), which
node may start (`rlflow.compiler.scheduler`).
"""
