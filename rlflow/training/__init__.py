"""Training code that all backends share, and the protocols that a backend implements.

The package has the update loop, minibatches and micro-batches, loss divisors, metrics and learning rates.
Models and optimizers are in `rlflow.backends`. Advantages and losses are in `rlflow.author.functional` and
`rlflow.algorithms`.
"""
