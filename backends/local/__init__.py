"""The local backend: Hugging Face causal language models on one CPU or one GPU, in this process.

It has a Trainer and a Generator. Several ranks that share one model are in `fsdp` and `deepspeed`,
minibatches in `rlflow.training`. It is the reference for other backends: plain PyTorch, unsharded, and tests
compare its results with a forward pass row by row.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
