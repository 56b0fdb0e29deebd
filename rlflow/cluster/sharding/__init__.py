"""Rows over ranks: which rank holds which rows of a column, which rows a call sends it, and which of these
another rank has.

Here: maps from rows to shards, splits and their balance, tensor-parallel groups, rows of optimizer steps, a
worker's store of shards. Not here: bytes on their way (`rlflow.cluster.rpc`), parts of weights
(`rlflow.training.weight_sync`).
"""
