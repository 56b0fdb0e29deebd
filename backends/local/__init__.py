"""The local backend runs Hugging Face causal language models on a single CPU or GPU, in this process.

It has a Trainer and a Generator, written in plain PyTorch without sharding, and is the reference for all
other backends. Tests compare its results with forward passes over single rows. `fsdp` and `deepspeed` split
models across ranks, and `rlflow.training` splits rows into minibatches.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
