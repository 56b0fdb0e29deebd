"""The local backend: Hugging Face causal language models on one CPU or one GPU, in this process.

Here: a Trainer and a Generator. Not here: several ranks that share one model (`fsdp`, `deepspeed`),
minibatches (`rlflow.training`). It is the reference for others: everything by plain PyTorch, nothing sharded,
results that tests compare with a forward pass row by row.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
