"""Weights of models on pools: the driver's handles of models, and transfers from trainers to generators.

This package contains planned transfers between pools, the code for both ends of such a transfer, and
transfers from a trainer to a generator on the same ranks. `rlflow.training.weight_sync` makes the plans and
provides the transports. `rlflow.execution.local_engine` decides when a transfer is due.
"""
