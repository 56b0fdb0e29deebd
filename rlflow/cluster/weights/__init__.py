"""Weights on pools: the driver's view of a model, and weight transfers from trainers to generators.

This package has planned transfers between pools, the two ends of such a transfer on the ranks, and transfers
between trainer and generator on the same ranks. `rlflow.training.weight_sync` makes plans and has the
transports; `rlflow.execution.local_engine` decides when a transfer is due.
"""
