"""Executor queues: the threads in which nodes run.

The threads are daemon threads, so a stage that never returns cannot keep the process alive.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch

from rlflow.compiler.passes.queues import ROOM
from rlflow.training import threads

Job = Callable[[], None]
T = TypeVar("T")


class Queues:
    """Executor queues, each with a fixed number of threads.

    A queue with no set number of threads, such as ``control``, starts a thread for each job, because its jobs
    wait for other jobs.
    """

    def __init__(self, room: Mapping[str, int] = ROOM) -> None:
        self.room = dict(room)
        self._queues: dict[str, queue.SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane, count in self.room.items():
            self._queues[lane] = queue.SimpleQueue()
            for _ in range(count):
                self._open(lane)

    def _open(self, lane: str) -> None:
        self._threads.append(
            threading.Thread(target=_work, args=(self._queues[lane],), name=lane, daemon=True)
        )
        self._threads[-1].start()

    def lost(self, lane: str) -> None:
        """Start another thread for the queue, to replace one that never returned."""
        if lane in self._queues:
            self._open(lane)

    def submit(self, lane: str, job: Job) -> None:
        """Run a job in a thread of the queue, after all jobs submitted earlier.

        A queue with no set number of threads starts a new thread for it.
        """
        run = contextvars.copy_context().run
        if lane in self._queues:
            self._queues[lane].put(lambda: run(job))
        else:
            threading.Thread(target=_begin, args=(lambda: run(job),), name=lane, daemon=True).start()

    def do(self, lane: str, call: Callable[[], T]) -> T:
        """Run a function in a thread of the queue, and wait for its result. An exception is raised here."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.submit(lane, job)
        return done.result()

    def close(self, seconds: float = 5.0) -> bool:
        """Stop the threads. Return True if all of them ended within ``seconds``.

        A thread ends when its running job returns. Python aborts if a thread is inside torch when the
        interpreter exits.
        """
        for thread in self._threads:
            self._queues[thread.name].put(None)
        limit = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(limit - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _begin(job)


def _begin(job: Job) -> None:
    """Run a job with the number of threads that torch is set to.

    Otherwise, libraries called by torch, such as MKL, would start one thread per core. Calling
    torch.get_num_threads first in each thread prevents this.
    """
    torch.get_num_threads()
    job()


@contextlib.contextmanager
def all_for(queues: Queues, lane: str) -> Iterator[None]:
    """Give all compute threads of the current thread to one queue's thread while this context is open.

    In every other thread, torch computes with a single thread meanwhile.
    """
    queues.do(lane, threads.keep)
    with threads.alone():
        yield
