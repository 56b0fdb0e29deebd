"""Weights of models on pools: the driver's handles of models, and transfers from trainers to generators.

This package has planned transfers between pools, the two ends of such a transfer on the ranks, and transfers
between trainer and generator on the same ranks. `rlflow.training.weight_sync` makes the plans and provides
the transports. `rlflow.execution.local_engine` decides when a transfer is due.
"""
