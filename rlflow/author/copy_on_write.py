"""Copy-on-write tensors, which callers may write into without changing the original memory.

Torch copies memory that it allocated, at the first write. For memory of a file (``FileMemory``), the kernel
copies each page at the first write into it.
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
    """Return a tensor with the same values that a caller may write into.

    The memory is copied at the first write. If torch allocated the memory, a call that returns an address
    (``numpy()``, ``data_ptr()``, DLPack) counts as a write. The memory is copied at once if neither torch nor
    a ``FileMemory`` owns it, if it is not on the CPU, if the tensor is part of a larger storage, or if it
    requires a gradient.
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
    """Return the address of a tensor's memory, for reading.

    Unlike ``data_ptr()``, this does not copy copy-on-write memory.
    """
    return torch_private.storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


class FileMemory:
    """A private mapping of an open file, whose memory tensors can use.

    A write never changes the file: the first write into a page makes a private copy of that page. Do not
    write into tensors of this memory while others read them. Instead, write into the result of ``again``.
    ``keeper`` is an object that keeps the file unchanged; this mapping holds a reference to it.

    Unlike Python's ``mmap``, this class does not keep a file descriptor for each mapping.
    """

    def __init__(self, descriptor: int, size: int, keeper: object, start: int = 0) -> None:
        """Map ``size`` bytes of the open file ``descriptor``.

        ``start``: offset in the file, a multiple of the page size.
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

        The memory stays mapped for the lifetime of the tensor and its views. If ``lendable`` is True,
        ``file_memory`` can find this mapping from the tensor.
        """
        if lendable:
            with _LISTING:
                _FILES[self.address] = self
        return torch.from_numpy(np.asarray(self))

    def again(self, tensor: Tensor) -> Tensor:
        """Return a copy-on-write copy of a tensor that is stored in this memory.

        The tensor is copied at once if the process cannot map more memory.
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
        """Unmap the memory.

        The address is cleared first, because the system may use it for a later mapping.
        """
        place, size, self.address, self.size = self.address, self.size, 0, 0
        if place:
            self._unmap(place, size)


def file_memory(tensor: Tensor) -> FileMemory | None:
    """Return the ``FileMemory`` that holds a tensor's memory; None if there is none.

    Finds only memory that ``FileMemory.tensor`` returned with ``lendable=True``.
    """
    place = address(tensor)
    with _LISTING:
        return next(
            (memory for memory in _FILES.values() if memory.address <= place < memory.address + memory.size),
            None,
        )


def _mapped(descriptor: int, start: int, size: int) -> int:
    """Map ``size`` bytes of a file privately, from the offset ``start``, and return the address.

    Raises OSError.
    """
    address: int = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, start
    )
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library of this process with typed ``mmap`` and ``munmap``."""
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
