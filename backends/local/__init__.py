"""The local backend: Hugging Face causal language models on one CPU or one GPU, in this process.

It has a Trainer and a Generator. It is the reference for other backends: plain PyTorch, unsharded, and tests
compare its results with forward passes of single rows. Models divided over several ranks are in `fsdp` and
`deepspeed`; minibatches are in `rlflow.training`.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
