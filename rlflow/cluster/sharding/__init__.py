"""Placement of rows on ranks: which rank stores which rows of a column, and which rows a call must send.

This package holds maps from rows to shards, splits and their balance, tensor-parallel groups, rows of
optimizer steps, and a worker's store of shards. Transport is in `rlflow.cluster.rpc`, parts of weights in
`rlflow.training.weight_sync`.
"""
