"""Jobs: your own classes as roles on groups of Ray workers, called from an ordinary Python script.

This package declares roles and their resources, starts and ends their ranks, makes type-checked calls to
them, and tells each rank its place in the job. `rlflow.cluster.rpc` sends the calls. For runs of flows, see
`rlflow.runs`. For launching on other machines, see `rlflow.cluster.submit`.
"""
