"""Lanes: the threads that nodes run in. Daemon threads, so that a stage that never returns cannot keep the
process alive."""

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

from rlflow.compiler.passes.lanes import ROOM
from rlflow.training import threads

Job = Callable[[], None]
T = TypeVar("T")


class Lanes:
    """A few threads for each lane; the lane ``control`` has a thread per job, for jobs that wait for
    others."""

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
        """A thread of the lane does not come back: another takes its place."""
        if lane in self._queues:
            self._open(lane)

    def submit(self, lane: str, job: Job) -> None:
        """Run a job in a thread of the lane, after the jobs that it already has. A lane without a limit
        starts a thread for each job."""
        run = contextvars.copy_context().run
        if lane in self._queues:
            self._queues[lane].put(lambda: run(job))
        else:
            threading.Thread(target=_begin, args=(lambda: run(job),), name=lane, daemon=True).start()

    def do(self, lane: str, call: Callable[[], T]) -> T:
        """Run a call in a thread of the lane, and wait. Gives or raises what the call does."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.submit(lane, job)
        return done.result()

    def close(self, seconds: float = 5.0) -> bool:
        """End the threads; whether all ended in time. A job that still runs ends its thread when it returns,
        if ever: Python aborts where such a thread is inside torch when the interpreter goes down."""
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
    """Run a job with as many threads as torch was told. Libraries that torch calls, such as MKL for the
    exponential of a few hundred numbers, take as many as there are cores where torch has not been asked in
    this thread before."""
    torch.get_num_threads()
    job()


@contextlib.contextmanager
def all_for(lanes: Lanes, lane: str) -> Iterator[None]:
    """While inside, torch computes in the thread of a lane with as many threads as in this one until now, and
    everywhere else with one."""
    lanes.do(lane, threads.keep)
    with threads.alone():
        yield
