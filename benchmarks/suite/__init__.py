"""Compare algorithms, settings and systems: alternate the cells of a suite, measure them and test the
differences.

The package reads suites, starts one process for each cell, records each turn in a journal, computes the
statistics, checks gates against past results and writes the page of results. `rlflow.runs` runs a training
run. `rlflow.monitoring` and `rlflow.execution` record its metrics and row accounting.
"""
