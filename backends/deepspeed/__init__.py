"""The DeepSpeed backend: ZeRO (Rajbhandari et al. 2020) divides optimizer state, gradients and weights over
the ranks of a pool.

The backend has a Trainer and no Generator, and code that finds where ZeRO keeps each part of a model.
Everything else comes from the local backend, so it computes the same numbers from the same files. Minibatches
over ranks are in `rlflow.training` and `rlflow.cluster.sharding`.
"""

from rlflow.backends.deepspeed.trainer import Trainer

__all__ = ["Trainer"]
