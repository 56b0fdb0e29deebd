"""A process beside each run that needs nothing of its interpreter: it ends what hangs, says what vanished, and leaves nothing behind.

Here: that process, what is written down for it, the launcher above a run, signals, stacks, processes that belong to a run.
Not here: deadlines of nodes (`rlflow.execution`), and workers that are silent (`rlflow.cluster.health.monitor`).
"""
