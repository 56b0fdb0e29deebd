"""Measure the memory of a small GRPO run: its tensors, and the used and free parts of the C library's heap.

    python benchmarks/memory.py [--suite peers] [--iterations 20] [--threads N]

The run is the cell `rlflow` of a suite. With `peers`, it has 4 prompts of about 190 tokens × 8 samples and a
model with 0.8M parameters. Only the reward runs in another process. Linux with glibc is required. With the
environment variable MALLOC_MMAP_THRESHOLD_=1048576, every tensor of at least 1 MiB gets its own pages. The
peak then contains only memory that is in use at the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import tempfile
import time
import warnings
from pathlib import Path

import torch

from rlflow.backends.local.heap import give_back, resident
from rlflow.benchmarks.rlflow_system import System
from rlflow.benchmarks.suite import find_suite, read_suite, with_files
from rlflow.cli.bench import made

MIB = 1 << 20
FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2, for its main arena."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def heap() -> Heap:
    """Return the current state of the C library's heap."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Heap
    info: Heap = ask()
    return info


def tensors() -> int:
    """Return the bytes of all tensors that Python's garbage collector finds. Shared storage counts once."""
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def line(iterations: int, seconds: float) -> str:
    """Return a line of the table: the memory of this process in MiB after ``iterations``."""
    now, peak = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    info = heap()
    sizes = (now, peak, tensors(), info.uordblks, info.fordblks)
    return " ".join(
        f"{text:>10}" for text in (iterations, f"{seconds:.2f}", *(f"{size / MIB:,.0f}" for size in sizes))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--suite", default="peers", choices=["peers", "peers_fixed"])
    parser.add_argument("--threads", type=int, help="default: as many as a run uses")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", FutureWarning)  # gc touches deprecated names, which would print warnings
    folder = Path(tempfile.mkdtemp())
    suite = read_suite(find_suite(given.suite))
    suite = with_files(suite, made(suite, folder))
    cell = next(each for each in suite.cells if each.system == "rlflow")
    system = System()
    system.prepare({"algorithm": cell.algorithm, "flags": dict(cell.flags), "recorded": 0}, str(folder), 0)
    print(
        " ".join(
            f"{name:>10}"
            for name in ("iterations", "cpu s each", "memory", "peak", "tensors", "heap used", "heap free")
        )
    )
    for done in range(2, given.iterations + 1, 2):
        start = time.process_time()
        system.iterate(2)
        print(line(done, (time.process_time() - start) / 2), flush=True)
    give_back()
    print(f"memory after free pages were returned to the system: {resident() / MIB:,.0f} MiB", flush=True)
    system.close()


if __name__ == "__main__":
    main()
