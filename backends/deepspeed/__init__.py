"""The DeepSpeed backend: ZeRO (Rajbhandari et al. 2020) divides optimizer state, gradients and weights over
the ranks of a pool.

It has a Trainer, and the code that knows where ZeRO keeps each part. Everything else comes from the local
backend: the same numbers from the same files. Sampling is elsewhere. Minibatches over ranks are in
`rlflow.training` and `rlflow.cluster.sharding`.
"""

from rlflow.backends.deepspeed.trainer import Trainer

__all__ = ["Trainer"]
