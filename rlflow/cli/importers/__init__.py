"""Settings of other projects as a configuration file of this one: what each of their keys becomes, and which
have no counterpart.

Here: readers of their scripts and files, and a table of keys for each project. Not here: their data and
reward functions, which are read as they are by `rlflow.data` and `rlflow.rewards`; neither project is
imported.
"""
