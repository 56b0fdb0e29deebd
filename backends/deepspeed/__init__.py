"""The DeepSpeed backend: ZeRO (Rajbhandari et al. 2020) divides optimizer state, gradients and weights over
the ranks of a pool.

The backend has a Trainer and no Generator. Its own code finds where ZeRO keeps each part of a model.
Everything else comes from the local backend, so both produce the same numbers from the same files.
`rlflow.training` and `rlflow.cluster.sharding` divide minibatches over ranks.
"""

from rlflow.backends.deepspeed.trainer import Trainer

__all__ = ["Trainer"]
