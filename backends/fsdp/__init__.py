"""The fsdp backend: each rank of a pool keeps a shard of a Hugging Face model, of its gradient and of its
optimizer (PyTorch's FSDP2).

Layers are gathered one at a time around their forward and backward pass; embedding, final norm and
language-model head together around the whole. With ``tensor_parallel`` adjacent ranks also share each layer's
matrix products. It has a Trainer and no Generator. Not here: sampling, and the model's own arithmetic, which
is the local backend's. In a process without a torch group there is nothing to shard, and it is the local
trainer.
"""

from rlflow.backends.fsdp.trainer import Trainer

__all__ = ["Trainer"]
