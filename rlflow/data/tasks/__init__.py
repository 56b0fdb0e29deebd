"""Packaged tasks: TOML settings for each algorithm, and the models, lessons and preference pairs that they
share.

The small models were trained with rlflow's `sft` flow. The choice of a run's task is in
`rlflow.config.packaged`. Users' data sets are read by `rlflow.data`.
"""
