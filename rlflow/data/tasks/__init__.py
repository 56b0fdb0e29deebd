"""Packaged tasks: TOML settings for each algorithm, with the models and data that they share.

The data are lessons and preference pairs. The small models were trained with rlflow's `sft` flow. The choice
of a run's task is in `rlflow.config.packaged`. Users' data sets are read by `rlflow.data`.
"""
