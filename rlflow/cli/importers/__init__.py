"""Import of other projects' settings: the flag of rlflow for each of their keys, and the keys without a
counterpart.

Here: readers of their scripts and files, and a table of keys for each project. Not here: their data and
reward functions, which `rlflow.data` and `rlflow.rewards` read unchanged. Neither project is imported.
"""
