"""The fsdp backend: each rank of a pool keeps a shard of a Hugging Face model, its gradient and its optimizer
(PyTorch's FSDP2).

Each layer is gathered around its forward and backward pass. Embedding, final norm and language-model head are
gathered together for the complete pass. With ``tensor_parallel``, adjacent ranks also share each layer's
matrix products. The backend has a Trainer and no Generator. The model's arithmetic is the local backend's. A
process without a torch group has nothing to shard and uses the local trainer.
"""

from rlflow.backends.fsdp.trainer import Trainer

__all__ = ["Trainer"]
