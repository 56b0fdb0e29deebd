"""Import the settings from other projects: find rlflow's flag for each key, and report keys without a
counterpart.

The package reads the projects' scripts and files, and has a table of keys for each project. It imports none
of the projects. `rlflow.data` and `rlflow.rewards` use their data and reward functions without conversion.
"""
