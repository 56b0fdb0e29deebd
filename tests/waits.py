"""A substitute for a GPU: torch's meta device, whose tensors have shapes and no content.

As on a GPU, host and device tensors cannot be mixed in one operation. Every operation that would make the
host wait for a GPU is counted and answered with invented content: results that the host reads (a mask that
selects entries selects all of them), and copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
LOOKS = {"item", "_local_scalar_dense", "is_nonzero", "equal"}
PICKING = {"index", "index_put", "index_put_"}
MADE = {torch.tensor, torch.as_tensor}  # filled by the host, for any destination


@contextmanager
def counted(answer: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[str]]:
    """Count the waiting operations by name, in order. answer: returns the host tensor for a device tensor
    copied there (default: zeros)."""
    found: list[str] = []
    with (
        _Calls(found),
        _Operations(found, answer or (lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))),
    ):
        yield found


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str], answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.found, self.answer = found, answer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        there = [tensor for tensor in _tensors([args, kwargs]) if tensor.device == DEVICE]
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        if name in LOOKS and there:
            self.found.append(name)
            return 0
        if name in ("to", "_to_copy") and kwargs.get("device", args[0].device) != args[0].device:
            if not kwargs.get("non_blocking"):
                self.found.append(f"to {kwargs['device'].type}")
            return (
                self.answer(args[0])
                if there
                else torch.empty(args[0].shape, dtype=args[0].dtype, device=DEVICE)
            )
        if name in PICKING and (masks := [index for index in args[1] if index is not None and _picks(index)]):
            self.found.append(name)
            return args[0].flatten(0, masks[0].dim() - 1) if name == "index" else args[0]
        if name == "nonzero" and there:
            self.found.append(name)
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=DEVICE)
        if there and any(tensor.device != DEVICE and tensor.dim() for tensor in _tensors([args, kwargs])):
            self.found.append(name)  # an index on the host, or a copy
        return function(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Operations that the dispatcher does not see."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (
            function in MADE
            and not isinstance(args[0], Tensor)
            and torch.device((kwargs or {}).get("device") or "cpu") == DEVICE
        ):
            self.found.append(function.__name__)
        return function(*args, **kwargs or {})


def _picks(index: Tensor) -> bool:
    return index.device == DEVICE and index.dtype == torch.bool


def _tensors(found: object) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
