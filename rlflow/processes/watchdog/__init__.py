"""Watchdog: a separate process next to each run that works without the run's interpreter.

It ends a run that hangs, reports a run that vanished, and removes leftovers. The package has that process,
the heartbeat page that it reads, the launcher above a run, signals, stacks, and the search for a run's
processes. Deadlines of nodes are in `rlflow.execution`; silent workers are handled by
`rlflow.cluster.health.monitor`.
"""
