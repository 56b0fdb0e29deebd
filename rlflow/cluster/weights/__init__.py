"""Weights on pools: the driver's view of a model, and its weights on their way from trainers to generators.

Here: transfers between pools by a plan, their two ends on the ranks, and transfers that stay on their ranks.
Not here: the plan of a transfer and its transports (`rlflow.training.weight_sync`), when a transfer is due
(`rlflow.execution.engine`).
"""
