"""Compile a flow to a plan: what an iteration computes, whether that is right, where and when it runs.

This package has the trace of a flow, its graph, the check, placement on pools, passes over plans, the
scheduler, the simulation and the preview. `rlflow.execution` carries a plan out. `rlflow.runs` provides what
else a run needs.
"""
