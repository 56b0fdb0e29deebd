"""Proving that a run learns from what it is paid for, on a few rows of its own, before its first iteration.

Here: rehearsals of an iteration with other scores, the gradients of its losses, and the claims that are
judged by them and on real weights. Not here: the walk over the graph that needs no rows
(`rlflow.compiler.check.reached`), and when a run does it (`rlflow.runs.proving`).
"""
