"""The fsdp backend, built on PyTorch's FSDP2. Each rank of a pool keeps one shard of a Hugging Face model,
its gradient and its optimizer state.

Each layer is gathered for its forward pass and again for its backward pass. The embedding, final norm and
language-model head are gathered together for the entire pass. With ``tensor_parallel``, neighbouring ranks
also share the matrix products of each layer. The backend has a Trainer but no Generator. Its arithmetic is
that of the local backend, and in a process without a torch group, where there's nothing to shard, it behaves
like the local trainer.
"""

from rlflow.backends.fsdp.trainer import Trainer

__all__ = ["Trainer"]
