"""Judging an algorithm before anything is started, at the settings given and with each setting changed alone.

Here: the report of `rlflow check`, and whether losses correct for stale rows. Not here: the rules of single
calls, which the tracer applies (`rlflow.compiler.trace.rules`); what a run needs besides
(`rlflow.runs.prepare`).
"""
