"""Watchdog: a separate process next to each run that does not depend on the run's interpreter.

It ends a run that hangs, reports a run that vanished, and removes leftovers. The package has the watchdog's
process, the heartbeat page that it reads, the launcher that starts a run, signals, stacks, and the search for
a run's processes. Deadlines of nodes are in `rlflow.execution`; `rlflow.cluster.health.monitor` handles
silent workers.
"""
