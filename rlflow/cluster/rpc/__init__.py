"""Communication between the driver and the workers of a run.

This package contains pools of Ray actors, calls to them with deadlines, short calls over sockets, messages,
and the conversion of batches to bytes. `rlflow.cluster.sharding` decides which rank gets which rows. The
operations themselves are in `rlflow.cluster.worker`.
"""
