"""From a flow to a plan: what an iteration computes, whether that is right, where and when it runs.

Here: the trace of a flow, its graph, the check, placement on pools, passes over plans, the scheduler, the
simulation and the preview. Not here: carrying a plan out (`rlflow.execution`), what a run needs besides its
plan (`rlflow.runs`).
"""
