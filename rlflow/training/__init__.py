"""Training code that all backends share, and the two protocols that a backend implements.

The package has minibatches and micro-batches, loss divisors, metrics, learning rates and the update loop.
Models and optimizers are in `rlflow.backends`. Advantages and losses of algorithms are in
`rlflow.author.functional` and `rlflow.algorithms`.
"""
