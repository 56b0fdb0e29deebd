"""Comparisons: suites of cells that take turns, what is measured of them, and the verdicts that the numbers
allow.

Here: reading a suite, a process for each cell, turns and their journal, statistics, history and gates, the
page of results. Not here: how a run itself goes (`rlflow.runs`) and what a run records (`rlflow.monitoring`,
the account of `rlflow.execution`).
"""
