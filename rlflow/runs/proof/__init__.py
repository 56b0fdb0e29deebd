"""Check before a run's first iteration that the run learns from its rewards.

The package runs an iteration on a few of the run's own rows, with synthetic scores in place of rewards. It
computes the gradients of the losses, and checks claims about these gradients and about the real weights.
`rlflow.compiler.check.reached` checks the graph without any rows. `rlflow.runs.proof.proving` calls this package
when a run starts.
"""
