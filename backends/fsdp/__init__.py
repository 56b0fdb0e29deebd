"""The fsdp backend: each rank of a pool keeps a shard of a Hugging Face model, its gradient and its optimizer
(PyTorch's FSDP2).

Each layer is gathered around its forward and backward pass. Embedding, final norm and language-model head are
gathered together for the complete pass. With ``tensor_parallel``, adjacent ranks also share each layer's
matrix products. The backend has a Trainer and no Generator. The model's arithmetic is the local backend's. In
a process without a torch group there is nothing to shard, so the local trainer is used.
"""

from rlflow.backends.fsdp.trainer import Trainer

__all__ = ["Trainer"]
