"""Training code shared by all backends, and the protocols that a backend implements.

This covers the update loop, minibatches and micro-batches, loss divisors, metrics and learning rates. Models
and optimizers are in `rlflow.backends`, advantages and losses in `rlflow.author.functional` and
`rlflow.algorithms`.
"""
