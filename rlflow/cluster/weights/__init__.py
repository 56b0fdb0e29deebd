"""Weights on pools: the driver's view of a model, and weight transfers from trainers to generators.

This package holds transfers between pools by a plan, their two ends on the ranks, and transfers that stay on
their ranks. Plans and transports are in `rlflow.training.weight_sync`. When a transfer is due is decided in
`rlflow.execution.engine`.
"""
