"""Move tensors out of memory and back, in place. Their storages are emptied and later filled again, so views,
tied weights and optimizers keep their tensors.

Tensors on a GPU move to host memory. Tensors in host memory move to an unnamed file that disappears with the
process, even after a crash. It is created in TMPDIR if this is set, or else in /var/tmp, which is on disk
even if /tmp is in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor, UntypedStorage

from rlflow.author import torch_private
from rlflow.backends.local.heap import give_back


@dataclass
class Stored:
    """An offloaded part's storages and their sizes, and the file or host tensors that hold their bytes."""

    storages: list[tuple[UntypedStorage, int]]
    file: IO[bytes] | None
    hosted: list[Tensor]


class OffloadedParts:
    """The offloaded parts of one trainer or generator, by name."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def __contains__(self, part: str) -> bool:
        return part in self._stored

    def put(self, part: str, tensors: Iterable[Tensor]) -> int:
        """Offload ``tensors`` as ``part`` by emptying their storages, and return the number of bytes freed.

        All views of these tensors lose their content until ``back``. Raises OSError, without freeing
        anything, if there isn't enough space.
        """
        if part in self._stored:
            return 0
        storages = list(_storages(tensors))
        on_host = all(storage.device.type == "cpu" for storage in storages)
        file = _written(storages) if on_host else None
        hosted = [] if file else [_bytes(storage).to("cpu", copy=True) for storage in storages]
        stored = self._stored[part] = Stored(
            [(storage, storage.nbytes()) for storage in storages], file, hosted
        )
        for storage in storages:
            storage.resize_(0)
        if file is not None:
            weakref.finalize(stored, file.close)  # if the owner is deleted while parts are offloaded
            give_back()  # malloc keeps free pages between memory in use
        else:
            torch.cuda.empty_cache()  # other engines on this GPU have their own allocators
        return sum(size for _, size in stored.storages)

    def back(self, part: str) -> int:
        """Refill the storages of ``part``, bit for bit, and return the number of bytes used, which is 0 if
        the part is already in memory."""
        stored = self._stored.pop(part, None)
        if stored is None:
            return 0
        for number, (storage, size) in enumerate(stored.storages):
            storage.resize_(size)
            if stored.file is None:
                _bytes(storage).copy_(stored.hosted[number])
        if stored.file is not None:
            with stored.file as file:
                _read(file, (storage for storage, _ in stored.storages))
        return sum(size for _, size in stored.storages)


def _written(storages: Iterable[UntypedStorage]) -> IO[bytes]:
    """Write the storages to an unnamed file and return it. Raises OSError if there isn't enough space."""
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    file = tempfile.TemporaryFile(prefix="rlflow-", dir=folder)  # noqa: SIM115 - it must outlive this call
    try:
        for storage in storages:
            file.write(_memory(storage))
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # closing writes the buffer, which does not fit either
            file.close()
        raise OSError(
            error.errno, f"{error.strerror}: no space for model parts in {folder or tempfile.gettempdir()}"
        ) from error
    return file


def _read(file: IO[bytes], storages: Iterable[UntypedStorage]) -> None:
    file.seek(0)
    for storage in storages:
        if file.readinto(_memory(storage)) != storage.nbytes():  # type: ignore[attr-defined]
            raise OSError("a file with offloaded model parts is shorter than it was written")


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield each distinct non-empty storage of the tensors. Memory that torch can't free, such as a mapped
    file, is first copied to memory allocated by torch."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(torch_private.storage_key(tensor), []).append(tensor)
    for tensors_of in by_storage.values():
        storage = tensors_of[0].untyped_storage()
        if not storage.resizable():
            storage = storage.clone()
            for tensor in tensors_of:
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
        if storage.nbytes():
            yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _memory(storage: UntypedStorage) -> memoryview:
    """Return the bytes of a storage in host memory. NumPy isn't used, because torch doesn't resize memory it
    has shared with NumPy."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
