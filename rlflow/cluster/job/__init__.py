"""Jobs: classes of the user as roles on groups of Ray workers, called from an ordinary script.

This package declares roles and their resources, starts and ends them, makes typed calls to their ranks, and
tells a rank its own place. Transport of calls is in `rlflow.cluster.rpc`, runs of flows in `rlflow.runs`, and
launching on other machines in `rlflow.cluster.submit`.
"""
