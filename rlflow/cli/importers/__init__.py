"""Import settings from other projects: find rlflow's flag for each key, and report keys that have none.

This package reads the scripts and files of these projects without importing them, and has a table of keys for
each project. Their data and reward functions can be used as they are, through `rlflow.data` and
`rlflow.rewards`.
"""
