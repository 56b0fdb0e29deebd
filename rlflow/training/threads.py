"""How many threads torch computes with: all where models are worked with, one elsewhere.

Each thread that computes has a team of OpenMP threads of its own as long as it lives. Where all teams
together are more than the cores, libgomp puts them to sleep after every operation, and work of many small
operations, such as sampling with a small model, takes twice as long. Stages, whose operations are few,
compute alone: their results do not depend on the number of threads either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def keep() -> None:
    """Fix the number of torch threads of the current thread. Otherwise torch reads the global number when the
    thread first computes."""
    torch.set_num_threads(torch.get_num_threads())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While inside, torch computes with one thread in this thread, and in those that compute for the first
    time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def others_alone() -> None:
    """Threads that compute for the first time from now on do so alone; this one does not."""
    keep()
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
