"""The DeepSpeed backend. ZeRO (Rajbhandari et al. 2020) splits weights, gradients and optimizer state across
the ranks of a pool.

It has a Trainer but no Generator. The code in this package only locates where ZeRO keeps each part of a
model. Everything else is shared with the local backend, so both compute the same numbers from the same files.
`rlflow.training` and `rlflow.cluster.sharding` split minibatches across ranks.
"""

from rlflow.backends.deepspeed.trainer import Trainer

__all__ = ["Trainer"]
