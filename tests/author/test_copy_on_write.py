"""Borrowed columns may be written into by any operation; the stored column does not change."""

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np
import pytest
import torch

from rlflow import Batch
from rlflow.author.batch import flatten, pad
from rlflow.author.copy_on_write import FileMemory, address, file_memory, writable_copy
from rlflow.execution.wire.column_wire import pack, unpack

EVEN = torch.full((8,), 64)
WRITES = {
    "in place": lambda x: x.add_(1.0),
    "an item": lambda x: x.__setitem__((0, 0), -1.0),
    "a view": lambda x: x[1:3].t().zero_(),
    "out=": lambda x: torch.exp(x, out=x),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
    "several at once": lambda x: torch._foreach_mul_([x], 2.0),
    "detached": lambda x: x.detach().zero_(),
    "numpy": lambda x: x.numpy().fill(-1.0),
    "DLPack": lambda x: np.from_dlpack(x).fill(-1.0),
    "its address": lambda x: ctypes.memset(x.data_ptr(), 1, 64),
    "its storage": lambda x: x.untyped_storage().fill_(1),
}


def numbers():
    return torch.arange(512.0)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_into_an_input_of_a_stage_changes_no_column(write):
    stored = numbers()
    seen, other = pad(stored, EVEN), pad(stored, EVEN)
    write(seen)
    assert not torch.equal(seen, numbers().reshape(8, 64))
    assert torch.equal(stored, numbers())
    assert torch.equal(other, numbers().reshape(8, 64))
    assert torch.equal(pad(stored, EVEN), numbers().reshape(8, 64))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_into_an_output_of_a_stage_changes_no_column(write):
    given = numbers().reshape(8, 64)
    stored = flatten(given, EVEN)
    write(given)
    assert torch.equal(stored, numbers())


@pytest.fixture
def file():
    """Return a file of shared memory with the numbers, and a view that writes into the file."""
    descriptor = os.memfd_create("numbers")
    os.truncate(descriptor, 4 * mmap.PAGESIZE)
    whole = torch.frombuffer(mmap.mmap(descriptor, 4 * mmap.PAGESIZE), dtype=torch.float32)
    whole[100:612] = numbers()
    yield descriptor, whole
    os.close(descriptor)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_into_a_stage_input_changes_neither_file_nor_column(write, file):
    descriptor, whole = file
    stored = FileMemory(descriptor, 4 * mmap.PAGESIZE, None).tensor().view(torch.float32)[100:612]
    seen, other = pad(stored, EVEN), pad(stored, EVEN)
    write(seen)
    assert not torch.equal(seen, numbers().reshape(8, 64))
    for column in (stored, whole[100:612], other, flatten(other, EVEN)):
        assert torch.equal(column.flatten(), numbers())


def test_a_lent_file_is_mapped_until_written_and_keeps_its_owner_alive(file):
    class Keeper:
        pass

    descriptor, whole = file
    keeper = Keeper()
    alive = weakref.ref(keeper)
    stored = FileMemory(descriptor, 4 * mmap.PAGESIZE, keeper).tensor().view(torch.float32)
    seen, given = writable_copy(stored[2048:]), flatten(writable_copy(stored[100:612]).reshape(8, 64), EVEN)
    whole[3000] = 7.0  # only a test does this: it shows that the memory was not copied
    assert seen[3000 - 2048] == 7.0
    assert file_memory(seen) is None  # it is writable, so it is copied when it is lent again
    del keeper, stored
    assert alive() is not None
    del seen
    assert alive() is None
    assert torch.equal(given, numbers())


def test_a_column_that_cannot_be_mapped_is_copied(file):
    descriptor = os.dup(file[0])
    stored = FileMemory(descriptor, 4 * mmap.PAGESIZE, None).tensor().view(torch.float32)[100:612]
    # the kernel refuses to map it, as in a process with too many mappings
    os.close(descriptor)
    writable_copy(stored).zero_()
    assert torch.equal(writable_copy(stored), numbers())


def test_reading_copies_nothing():
    stored = numbers()
    seen = pad(stored, EVEN)
    torch.where(seen > 3, seen.exp(), seen).cumsum(1)[:, 3].tolist()
    kept = flatten(seen, EVEN)
    assert address(stored) == address(seen) == address(kept)


def test_packing_copies_a_lent_column_once():
    batch = Batch.of(rewards=[[1.0, 2.0], [3.0, 4.0]])
    seen = batch["rewards"]
    frame = pack(batch)
    assert address(batch.data["rewards"].value) == address(seen)
    assert unpack(frame)["rewards"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    "stored",
    [torch.from_numpy(np.arange(512.0)), torch.arange(1024.0)[:512]],
    ids=["not torch's own", "a part"],
)
def test_other_memory_is_copied_at_once(stored):
    seen = writable_copy(stored)
    assert address(seen) != address(stored)
    seen.zero_()
    assert torch.equal(stored, torch.arange(512.0, dtype=stored.dtype))


def test_the_address_is_the_address_of_the_first_entry():
    whole = numbers()
    assert address(whole[7:]) == whole[7:].data_ptr()


def test_gradients_flow_through_padding():
    leaf = torch.ones(4, requires_grad=True)
    pad(2 * leaf, torch.tensor([2, 2])).mul_(3.0).sum().backward()
    assert leaf.grad.tolist() == [6.0] * 4


def test_many_threads_borrow_and_write_at_once():
    stored, wrong = [numbers() for _ in range(200)], []

    def borrow(number):
        for column in stored:
            seen = pad(column, EVEN)
            seen += number
            if not torch.equal(seen, numbers().reshape(8, 64) + number):
                wrong.append(number)

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert all(torch.equal(column, numbers()) for column in stored)
