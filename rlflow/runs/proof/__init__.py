"""Prove before a run's first iteration, on a few of its own rows, that it learns from its rewards.

The package runs an iteration with synthetic scores, computes the gradients of its losses, and checks claims
about these gradients and about real weights. `rlflow.compiler.check.reached` checks the graph without rows,
and `rlflow.runs.proving` checks a run at its start.
"""
