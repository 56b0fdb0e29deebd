"""Lending memory: tensors for somebody who may write into them, over memory that must not change.

Of memory that torch owns torch makes the copies, of a file's memory the kernel, page by page
(``FileMemory``).
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
# address → memory that can be lent again
_FILES: weakref.WeakValueDictionary[int, FileMemory] = weakref.WeakValueDictionary()
_LISTING = threading.Lock()


def lent(tensor: Tensor) -> Tensor:
    """A tensor like this one that may be written into: torch, or the kernel, copies its memory at the first
    write, and not before.

    What hands out an address (``numpy()``, ``data_ptr()``, DLPack) counts as a write to torch's own memory.
    Memory that is neither torch's own nor a file's, not on the host, part of a larger storage, or under
    autograd is copied at once.
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
    """The address of a tensor's memory, for reading: ``data_ptr()`` would copy memory that is lent."""
    storage: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return storage + int(tensor.storage_offset()) * tensor.element_size()


class FileMemory:
    """Memory of an open file, as this process alone sees it: a page that is written into becomes a copy of
    its own, and the file stays as it is. Tensors on it may not be written into where others read them;
    ``again`` gives those that may. ``keeper``: what keeps the file as it is, held as long as any of this
    memory is.

    Python's own ``mmap`` would keep a descriptor open for each piece of memory that is lent.
    """

    def __init__(self, descriptor: int, size: int, keeper: object, start: int = 0) -> None:
        """``start``: of the memory within the file, a multiple of the page size."""
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
        """The memory, uint8 [size]; it stays as long as the tensor or a view of it. ``lendable``: whether
        ``file_memory`` finds it."""
        if lendable:
            with _LISTING:
                _FILES[self.address] = self
        return torch.from_numpy(np.asarray(self))

    def again(self, tensor: Tensor) -> Tensor:
        """A tensor like this one, which lies in this memory, on memory of its own that is copied when it is
        written into; at once where there can be no more such memory."""
        if not tensor.is_contiguous() or not tensor.numel():
            return tensor.clone()
        first = address(tensor) - self.address
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            memory = FileMemory(
                self._descriptor, first + tensor.nbytes - start, self._keeper, self._start + start
            )
        except OSError:  # the kernel gives a process no more pieces of memory (vm.max_map_count)
            return tensor.clone()
        return torch.from_numpy(np.asarray(memory))[first - start :].view(tensor.dtype).view(tensor.shape)

    def __del__(self) -> None:
        """Give the memory back. From here on nothing is found in it, since another file's may come to lie at
        its address."""
        place, size, self.address, self.size = self.address, self.size, 0, 0
        if place:
            self._unmap(place, size)


def file_memory(tensor: Tensor) -> FileMemory | None:
    """The memory that ``FileMemory.tensor`` gave and in which a tensor lies; None where it lies elsewhere."""
    place = address(tensor)
    with _LISTING:
        return next(
            (memory for memory in _FILES.values() if memory.address <= place < memory.address + memory.size),
            None,
        )


def _mapped(descriptor: int, start: int, size: int) -> int:
    """The address of private memory over a file. Raises OSError."""
    address: int = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, start
    )
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library of this process, with the types of what is called."""
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
