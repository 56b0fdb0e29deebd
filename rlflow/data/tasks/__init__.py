"""Packaged tasks: TOML settings for each algorithm, and the small models, lessons and pairs that they share.

The models were trained with the project's own `sft` flow. The choice of a task for a run is in
`rlflow.runs.packaged`; users' data sets are read by `rlflow.data`.
"""
