"""Whether the workers of a run live: heartbeats, who watches them, what is found out of a dead one, and how a
hanging one is ended.

Here: the health monitor of a run's pools, a worker's heartbeat, the post-mortem of a process, the processes
of a local Ray. Not here:
starting a pool anew (`rlflow.cluster.fleet`), going back to a commit (`rlflow.runs.recovery`), the run's end
(`rlflow.processes.watchdog`).
"""
