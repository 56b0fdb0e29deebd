"""The local backend: Hugging Face causal language models on one CPU or one GPU, in this process.

It is the reference for others: everything by plain PyTorch, nothing sharded, results that tests compare with a forward pass row
by row.
"""

from rlflow.backends.local.generator import Generator
from rlflow.backends.local.trainer import Trainer

__all__ = ["Generator", "Trainer"]
