"""Comparisons: suites of cells that take turns, what is measured of them, and the verdicts that the numbers allow.

Not here: how a run itself goes (`rlflow.runs`) and what a run records (`rlflow.watch`, the account of `rlflow.execution`).
"""
