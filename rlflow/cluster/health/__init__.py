"""Health checks of a run's workers: heartbeats, their monitor, and postmortems.

A postmortem examines a dead or hanging worker. The package also kills hanging workers, and checks the
processes of a local Ray. `rlflow.cluster.run_workers` starts pools again, `rlflow.runs.recovery` restores a
commit, and `rlflow.processes.watchdog` ends remaining processes when the run ends.
"""
