"""Learning, apart from any engine: the two protocols of backends, and what all trainers share.

Here: minibatches and micro-batches, divisors, metrics, learning rates, the loop of an update. Not here:
models and optimizers (`rlflow.backends`), advantages and losses of algorithms (`rlflow.author.functional`,
`rlflow.algorithms`).
"""
