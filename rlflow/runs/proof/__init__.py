"""Prove that a run learns from its rewards, on a few of its own rows, before its first iteration.

The package has dry runs of an iteration with synthetic scores, the gradients of its losses, and the claims
that are checked with them and on real weights. Checks of the graph without rows are in
`rlflow.compiler.check.reached`; `rlflow.runs.proving` checks a run at its start.
"""
