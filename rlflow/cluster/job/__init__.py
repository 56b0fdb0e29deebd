"""Jobs: your own classes as roles on groups of Ray workers, called from an ordinary Python script.

This package declares roles and their resources, starts and ends their ranks, calls the ranks with
type-checked methods, and tells each rank its place in the job. Calls are sent by `rlflow.cluster.rpc`. Runs
of flows are in `rlflow.runs`, and launches on other machines in `rlflow.cluster.submit`.
"""
