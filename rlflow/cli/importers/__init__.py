"""Import other projects' settings: find rlflow's flag for each of their keys, and report the keys without a
counterpart.

Here: readers of their scripts and files, and a table of keys for each project. Not here: reading their data
and calling their reward functions, which `rlflow.data` and `rlflow.rewards` do without conversion. Neither
project is imported.
"""
