"""Offloading really frees memory and restores its contents."""

import ctypes
import gc
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlflow.backends.local.offload import OffloadedParts

LARGE = 24 << 20  # bytes from which malloc returns memory to the system at once


def resident():
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_memory_of_a_process_shrinks_and_its_bits_return():
    one = torch.arange(2 * LARGE // 4, dtype=torch.float32)
    copy, before, offloaded = one.clone(), resident(), OffloadedParts()
    assert offloaded.put("weights", [one]) == one.nbytes
    assert one.untyped_storage().nbytes() == 0
    assert resident() < before - LARGE
    assert offloaded.back("weights") == one.nbytes
    assert torch.equal(one, copy)


def test_memory_between_other_allocations_is_freed():
    child = os.fork()
    if child == 0:
        gc.freeze()  # garbage of earlier tests could wait for threads that a fork does not have
        code = 1
        try:
            ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: allocate everything from the heap
            one, above = torch.ones(2 * LARGE // 4), torch.ones(LARGE // 4)
            before = resident()
            OffloadedParts().put("weights", [one])
            code = int(not (resident() < before - LARGE and above.sum() == len(above)))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_views_and_ties_survive_offloading():
    flat = torch.arange(12, dtype=torch.float64)
    matrix, tied = flat.view(3, 4)[:, 1:], flat[3:]
    offloaded = OffloadedParts()
    assert offloaded.put("weights", [matrix, tied]) == flat.nbytes
    offloaded.back("weights")
    assert torch.equal(flat, torch.arange(12, dtype=torch.float64))
    flat[5] = -1
    assert matrix[1, 0] == tied[2] == -1


def test_memory_that_torch_cannot_resize_is_copied_first(tmp_path):
    save_file(
        {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "mapped.safetensors"
    )
    mapped = load_file(tmp_path / "mapped.safetensors")
    learning = torch.nn.Parameter(mapped["a"])
    assert not learning.untyped_storage().resizable()
    offloaded = OffloadedParts()
    assert offloaded.put("weights", [learning, mapped["b"]]) == 4006
    offloaded.back("weights")
    assert torch.equal(learning, torch.arange(1000.0))
    assert mapped["b"].tolist() == [1, 1, 1]


def test_offloaded_parts_have_no_named_file_and_need_free_space(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    one, offloaded = torch.ones(1000), OffloadedParts()
    offloaded.put("weights", [one])
    assert list(tmp_path.iterdir()) == []
    assert (offloaded.put("weights", [one]), offloaded.back("optimizer"), offloaded.back("weights")) == (
        0,
        0,
        4000,
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(OSError, match="gone"):
        offloaded.put("weights", [one])
    assert torch.equal(one, torch.ones(1000))


def test_a_full_disk_frees_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    one, offloaded = torch.ones(1 << 18), OffloadedParts()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=f"no space for model parts in {tmp_path}"):
            offloaded.put("weights", [one])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "weights" not in offloaded
    assert torch.equal(one, torch.ones(1 << 18))
