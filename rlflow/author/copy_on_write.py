"""Copy-on-write tensors: callers may write into them without changing the original memory.

Torch copies the memory that torch owns. The kernel copies the memory of a file (``FileMemory``), page by
page.
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

_LENDING = threading.Lock()  # the first clone changes how the storage owns its memory
# address → file memory that can be mapped again
_FILES: weakref.WeakValueDictionary[int, FileMemory] = weakref.WeakValueDictionary()
_LISTING = threading.Lock()


def writable_copy(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values that may be written into; its memory is copied at the first write.

    For torch's own memory, a call that returns an address (``numpy()``, ``data_ptr()``, DLPack) counts as a
    write. The memory is copied at once if it belongs to neither torch nor a file, is not on the host, is part
    of a larger storage, or is under autograd.
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
        return torch._lazy_clone(tensor)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory for reading; ``data_ptr()`` would copy copy-on-write memory."""
    storage: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return storage + int(tensor.storage_offset()) * tensor.element_size()


class FileMemory:
    """A private mapping of an open file.

    The first write into a page makes a private copy of that page, so the file does not change. Do not write
    into tensors of this memory while others read them; ``again`` returns tensors that may be written into.
    ``keeper`` is an object that keeps the file unchanged; this object references it for its lifetime.

    Python's own ``mmap`` would keep a descriptor open for each mapping.
    """

    def __init__(self, descriptor: int, size: int, keeper: object, start: int = 0) -> None:
        """``start``: offset of the memory within the file, a multiple of the page size."""
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
        """Return the memory as uint8 [size].

        The memory stays mapped for the lifetime of the tensor and its views. If ``lendable`` is True,
        ``file_memory`` finds this object from the tensor.
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

        Clears the address first, so that lookups do not find a later mapping at the same address.
        """
        place, size, self.address, self.size = self.address, self.size, 0, 0
        if place:
            self._unmap(place, size)


def file_memory(tensor: Tensor) -> FileMemory | None:
    """Return the ``FileMemory`` that a tensor is stored in, or None.

    Finds only memory that ``FileMemory.tensor`` returned with ``lendable=True``.
    """
    place = address(tensor)
    with _LISTING:
        return next(
            (memory for memory in _FILES.values() if memory.address <= place < memory.address + memory.size),
            None,
        )


def _mapped(descriptor: int, start: int, size: int) -> int:
    """Return the address of a new private mapping of a file. Raises OSError."""
    address: int = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, start
    )
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library of this process, with the argument types of ``mmap`` and ``munmap`` set."""
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
