"""The local backend runs Hugging Face causal language models on one CPU or one GPU, in this process.

It has a Trainer and a Generator. It is plain PyTorch without sharding, and the reference for other backends.
Tests compare its results with forward passes of single rows. `fsdp` and `deepspeed` divide models over
several ranks. `rlflow.training` divides rows into minibatches.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
