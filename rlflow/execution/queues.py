"""Executor queues: the threads that nodes run in.

They are daemon threads, so that a stage that never returns cannot keep the process alive.
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
    """Executor queues with a few threads each.

    The queue ``control`` starts a thread per job, because its jobs wait for other jobs.
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
        """Start another thread in the queue, because one of its threads does not return."""
        if lane in self._queues:
            self._open(lane)

    def submit(self, lane: str, job: Job) -> None:
        """Run a job in a thread of the queue, after the jobs that are already queued.

        A queue without a thread limit starts a new thread for the job.
        """
        run = contextvars.copy_context().run
        if lane in self._queues:
            self._queues[lane].put(lambda: run(job))
        else:
            threading.Thread(target=_begin, args=(lambda: run(job),), name=lane, daemon=True).start()

    def do(self, lane: str, call: Callable[[], T]) -> T:
        """Run a call in a thread of the queue, wait for it, and return or raise its result."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.submit(lane, job)
        return done.result()

    def close(self, seconds: float = 5.0) -> bool:
        """Stop the threads; return whether all ended within ``seconds``.

        A running job ends its thread when it returns. Python aborts if such a thread is inside torch at
        interpreter exit.
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
    """Run a job with the thread count that torch is set to.

    Libraries that torch calls, such as MKL, would otherwise start one thread per core. Calling
    torch.get_num_threads first in each thread prevents that.
    """
    torch.get_num_threads()
    job()


@contextlib.contextmanager
def all_for(queues: Queues, lane: str) -> Iterator[None]:
    """Return a context in which one queue's thread computes with all of this thread's compute threads.

    In all other threads, torch computes with one thread while the context is open.
    """
    queues.do(lane, threads.keep)
    with threads.alone():
        yield
