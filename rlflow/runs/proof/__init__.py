"""Before a run's first iteration, check that the run learns from its rewards.

This package runs an iteration on a few of the run's own rows, with synthetic scores in place of rewards. It
computes the gradients of the losses, and checks claims about these gradients and about the real weights. For
checks of the graph that need no rows, see `rlflow.compiler.check.reached`. `rlflow.runs.proof.proving` uses
this package when a run starts.
"""
