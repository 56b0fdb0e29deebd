"""Packaged tasks: settings as TOML for each algorithm, and the small models, lessons and pairs that they
share.

Here: data, and the module that makes it by the project's own `sft` flow.
Not here: choosing a task for a run (`rlflow.runs.packaged`), and data sets of users (`rlflow.data`).
"""
