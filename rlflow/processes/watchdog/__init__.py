"""Watchdog: a separate process next to each run, which works even if the run's interpreter hangs.

It kills a run that hangs, reports a run that vanished, and removes leftovers. This package has the watchdog's
process, the heartbeat page that it reads, the launcher that starts a run, signals, stacks, and the search for
a run's processes. Deadlines of nodes are in `rlflow.execution`. Silent workers are handled by
`rlflow.cluster.health.monitor`.
"""
