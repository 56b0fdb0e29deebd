"""Copy-on-write tensors: callers can write to them without changing the original memory.

Memory allocated by torch is copied as a whole at the first write. Memory mapped from a file (``FileMemory``)
is copied by the kernel, one page at a time, when that page is first written to.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from rlflow.author import torch_private

_LENDING = threading.Lock()  # the first clone changes how the storage owns its memory
# address → file memory that can be mapped again
_FILES: weakref.WeakValueDictionary[int, FileMemory] = weakref.WeakValueDictionary()
_LISTING = threading.Lock()


def writable_copy(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values that the caller can write to.

    If possible, the memory isn't copied until the first write. For memory allocated by torch, asking for an
    address (``numpy()``, ``data_ptr()``, DLPack) counts as a write. The copy is made right away if the memory
    belongs to neither torch nor a ``FileMemory``, or if the tensor isn't on the CPU, is part of a larger
    storage, or requires a gradient.
    """
    storage = tensor.untyped_storage()
    if tensor.is_cpu and not storage.resizable() and (memory := file_memory(tensor)) is not None:
        return memory.again(tensor)
    if (
        not (tensor.is_cpu and storage.resizable() and storage.nbytes() == tensor.nbytes)
        or tensor.requires_grad
    ):
        return tensor.clone()
    with _LENDING:
        return torch_private.lazy_clone(tensor)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, for reading only.

    Unlike ``data_ptr()``, this doesn't trigger a copy of copy-on-write memory.
    """
    return torch_private.storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


class FileMemory:
    """A private mapping of an open file, for use as the memory of tensors.

    The file itself never changes: the first write to a page makes a private copy of it. Don't write to these
    tensors while others are reading them; write to the result of ``again`` instead. The mapping keeps a
    reference to ``keeper``, an object that prevents the file from changing.

    Unlike Python's ``mmap``, this doesn't hold a file descriptor per mapping.
    """

    def __init__(self, descriptor: int, size: int, keeper: object, start: int = 0) -> None:
        """Map ``size`` bytes of the open file ``descriptor``, beginning at the offset ``start``.

        ``start`` must be a multiple of the page size.
        """
        self._descriptor = descriptor
        self._keeper = keeper
        self._start = start
        self.size = size
        self.address = 0
        self._unmap = _libc().munmap
        self.address = _mapped(descriptor, start, size)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def tensor(self, lendable: bool = True) -> Tensor:
        """Return the mapped memory as a uint8 tensor [size].

        The memory stays mapped as long as the tensor or a view of it exists. With ``lendable``,
        ``file_memory`` can find this mapping from the tensor.
        """
        if lendable:
            with _LISTING:
                _FILES[self.address] = self
        return torch.from_numpy(np.asarray(self))

    def again(self, tensor: Tensor) -> Tensor:
        """Return a copy-on-write copy of a tensor stored in this memory.

        If the process can't map any more memory, the tensor is copied right away.
        """
        if not tensor.is_contiguous() or not tensor.numel():
            return tensor.clone()
        first = address(tensor) - self.address
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            memory = FileMemory(
                self._descriptor, first + tensor.nbytes - start, self._keeper, self._start + start
            )
        except OSError:  # the process has reached the kernel's limit of mappings (vm.max_map_count)
            return tensor.clone()
        return torch.from_numpy(np.asarray(memory))[first - start :].view(tensor.dtype).view(tensor.shape)

    def __del__(self) -> None:
        """Unmap the memory, after forgetting its address, which the system may reuse."""
        place, size, self.address, self.size = self.address, self.size, 0, 0
        if place:
            self._unmap(place, size)


def file_memory(tensor: Tensor) -> FileMemory | None:
    """Return the ``FileMemory`` that a tensor's memory belongs to, or None.

    Only tensors made by ``FileMemory.tensor`` with ``lendable=True`` are found.
    """
    place = address(tensor)
    with _LISTING:
        return next(
            (memory for memory in _FILES.values() if memory.address <= place < memory.address + memory.size),
            None,
        )


def _mapped(descriptor: int, start: int, size: int) -> int:
    """Map ``size`` bytes of a file privately, beginning at the offset ``start``, and return the address."""
    address: int = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, start
    )
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@functools.cache
def _libc() -> ctypes.CDLL:
    """Load the C library, with typed ``mmap`` and ``munmap``."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library
