"""Lending memory: tensors for somebody who may write into them, over memory that must not change."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_LENDING = threading.Lock()  # the first clone changes how the storage owns its memory


def lent(tensor: Tensor) -> Tensor:
    """A tensor like this one that may be written into: torch copies its memory at the first write to either, and not before.

    What hands out an address (``numpy()``, ``data_ptr()``, DLPack) counts as a write. Memory that is not torch's own, not on the host,
    part of a larger storage, or under autograd is copied at once.
    """
    storage = tensor.untyped_storage()
    if not (tensor.is_cpu and storage.resizable() and storage.nbytes() == tensor.nbytes) or tensor.requires_grad:
        return tensor.clone()
    with _LENDING:
        return torch._lazy_clone(tensor)


def address(tensor: Tensor) -> int:
    """The address of a tensor's memory, for reading: ``data_ptr()`` would copy memory that is lent."""
    storage: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return storage + int(tensor.storage_offset()) * tensor.element_size()
