"""Learning, apart from any engine: the protocols of backends, minibatches, divisors and metrics."""
