"""Placement of rows on ranks: which rank stores which rows of a column, and which rows a call must send.

This package contains the maps from rows to shards, balanced splits of rows, tensor-parallel teams, the rows
of optimizer steps, and a worker's store of shards. `rlflow.cluster.rpc` sends the rows, and
`rlflow.training.weight_sync` splits weights.
"""
