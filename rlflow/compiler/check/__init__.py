"""Check an algorithm before a run, both with its given settings and with each setting changed.

This package makes the report of `rlflow check`. Rules for single calls are applied by the tracer
(`rlflow.compiler.trace.rules`), and `rlflow.runs.prepare` checks everything else that a run needs.
"""
