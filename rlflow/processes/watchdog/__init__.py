"""The watchdog: a process beside each run that works without the run's interpreter. It ends a run that hangs,
reports one that vanished, and removes what a run leaves behind.

Here: that process, what is written down for it, the launcher above a run, signals, stacks, processes that
belong to a run. Not here: deadlines of nodes (`rlflow.execution`), and workers that are silent
(`rlflow.cluster.health.monitor`).
"""
