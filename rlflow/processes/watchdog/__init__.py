"""The watchdog, a separate process next to each run that works even if the run's interpreter hangs.

It kills a run that hangs, reports a run that vanished, and cleans up what is left. This package contains the
watchdog's process, the heartbeat page that it reads, the launcher that starts a run, signals, stacks, and the
search for a run's processes. Deadlines of nodes are in `rlflow.execution`, and
`rlflow.cluster.health.monitor` deals with silent workers.
"""
