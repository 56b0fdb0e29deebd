"""Check an algorithm before a run, with the given settings and with each setting changed alone.

This package makes the report of `rlflow check`. The tracer applies the rules for single calls
(`rlflow.compiler.trace.rules`). `rlflow.runs.prepare` checks everything else that a run needs.
"""
