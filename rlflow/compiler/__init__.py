"""Compile a flow to a plan: what an iteration computes, whether it is correct, and where and when it runs.

This package has the trace of a flow, its graph, the check, placement on pools, passes over plans, the
scheduler, the simulation and the preview. `rlflow.execution` executes a plan. `rlflow.runs` provides
everything else that a run needs.
"""
