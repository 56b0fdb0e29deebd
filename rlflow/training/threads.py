"""Set how many threads torch computes with: all of them for models, one for everything else.

Each Python thread that computes has its own team of OpenMP threads. If the teams together have more threads
than the machine has cores, libgomp puts threads to sleep after every operation, and many small operations,
such as sampling with a small model, take twice as long. Stages have few operations, so they use one thread.
Their results don't depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def keep() -> None:
    """Fix torch's current number of threads for this thread. Otherwise, torch would read the global number
    when the thread first computes."""
    torch.set_num_threads(torch.get_num_threads())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make torch use one thread inside a ``with`` block. This applies to the calling thread, and to any that
    compute for the first time during the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def others_alone() -> None:
    """Make torch use one thread in every other Python thread that first computes from now on. The calling
    thread keeps its number."""
    keep()
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
