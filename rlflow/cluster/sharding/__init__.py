"""Placement of rows on ranks: which rank stores which rows of a column, and which rows a call must send.

This package holds maps from rows to shards, splits and their balance, tensor-parallel groups, rows of
optimizer steps, and a worker's store of shards. `rlflow.cluster.rpc` transports rows, and
`rlflow.training.weight_sync` splits weights.
"""
