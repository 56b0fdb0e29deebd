"""Communication between the driver and the workers of a run.

This package holds pools of Ray actors and calls to them with deadlines, short calls over sockets, the
messages, and batches as bytes. `rlflow.cluster.sharding` decides which rows go to which rank. The operations
themselves are in `rlflow.cluster.worker`.
"""
