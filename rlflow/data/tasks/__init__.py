"""Packaged tasks: TOML settings for each algorithm, with shared small models, lessons and preference pairs.

The models were trained with rlflow's `sft` flow. The choice of a run's task is in `rlflow.runs.packaged`.
Users' data sets are read by `rlflow.data`.
"""
