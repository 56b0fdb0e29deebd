"""The fsdp backend, based on PyTorch's FSDP2: each rank of a pool keeps a shard of a Hugging Face model, of
its gradient and of its optimizer state.

Each layer is gathered for its forward and its backward pass. Embedding, final norm and language-model head
are gathered together for the complete pass. With ``tensor_parallel``, adjacent ranks also divide the matrix
products of each layer. The backend has a Trainer and no Generator. The arithmetic is the local backend's. In
a process without a torch group, the trainer behaves like the local trainer, because there is nothing to
shard.
"""

from rlflow.backends.fsdp.trainer import Trainer

__all__ = ["Trainer"]
