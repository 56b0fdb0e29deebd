"""Health of a run's workers: heartbeats, their monitor, and postmortems of dead or hanging workers.

It also kills hanging workers, and checks the processes of a local Ray. `rlflow.cluster.run_workers` starts pools
again, `rlflow.runs.recovery` returns to a commit, and `rlflow.processes.watchdog` handles the end of the run.
"""
