"""Health checks of a run's workers: heartbeats, the monitor that requests them, and postmortems.

A postmortem examines a dead or hanging worker. This package also kills hanging workers, and checks the
processes of a local Ray. `rlflow.cluster.run_workers` restarts pools, `rlflow.runs.recovery` restores a
commit, and `rlflow.processes.watchdog` ends any processes left when the run ends.
"""
