"""Set the number of threads that torch uses for computing: all threads for models, one for everything else.

Each Python thread that computes has its own team of OpenMP threads. If all teams together have more threads
than the machine has cores, libgomp puts the threads to sleep after every operation. Many small operations,
such as sampling with a small model, then take twice as long. Stages have few operations, so they use one
thread. Their results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def keep() -> None:
    """Fix torch's current number of threads for this thread. Without this call, torch would read the global
    number when the thread first computes."""
    torch.set_num_threads(torch.get_num_threads())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Return a context in which torch uses one thread. This applies to the calling thread, and to threads
    that compute for the first time inside the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def others_alone() -> None:
    """From now on, make torch use one thread in each other Python thread that computes for the first time.
    The calling thread keeps its number."""
    keep()
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
