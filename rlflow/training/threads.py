"""Set the number of threads that torch computes with: all threads for models, one for everything else.

Each thread that computes keeps its own team of OpenMP threads. If all teams together have more threads than
the machine has cores, libgomp puts the threads to sleep after every operation. Work with many small
operations, such as sampling with a small model, then takes twice as long. Stages have few operations, so they
compute with one thread; their results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def keep() -> None:
    """Fix the number of torch threads for the current thread. Otherwise torch reads the global number when
    the thread first computes."""
    torch.set_num_threads(torch.get_num_threads())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make torch compute with one thread inside this context. This applies to this thread and to threads that
    compute for the first time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def others_alone() -> None:
    """Make all other threads that compute for the first time from now on use one torch thread."""
    keep()
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
