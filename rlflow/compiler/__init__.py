"""Compile a flow to a plan: what an iteration computes, whether it is correct, and where and when it runs.

This package traces flows, and has the graph, the check, the placement on pools, the passes over plans, the
scheduler, the simulation and the preview. `rlflow.execution` runs a plan. `rlflow.runs` has everything else
that a run needs.
"""
