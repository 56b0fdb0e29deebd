"""Compile a flow to a plan: what an iteration computes, whether it's correct, and where and when it runs.

This package traces flows. It contains the graph, the check, the placement on pools, the passes over plans,
the scheduler, the simulation and the preview. `rlflow.execution` runs a plan, and `rlflow.runs` has
everything else that a run needs.
"""
