"""The DeepSpeed backend: ZeRO (Rajbhandari et al. 2020) over the ranks of a pool, which share optimizer
state, gradients and weights.

Here: a Trainer, and where ZeRO keeps what. Not here: sampling, and minibatches over ranks (`rlflow.training`,
`rlflow.cluster.sharding`). Everything else is the local backend's: it computes the same numbers from the same
files.
"""

from rlflow.backends.deepspeed.trainer import Trainer

__all__ = ["Trainer"]
