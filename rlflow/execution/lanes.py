"""Lanes: the threads that nodes run in. Daemon threads, so that a stage that never returns cannot keep the process alive."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Mapping

Job = Callable[[], None]

ROOM: dict[str, int] = {"model": 1, "cpu": 2, "io": 8}  # model stages of one process share its cores: one at a time


class Lanes:
    """A few threads for each lane; the lane ``control`` has a thread per job, for jobs that wait for others."""

    def __init__(self, room: Mapping[str, int] = ROOM) -> None:
        self.room = dict(room)
        self._queues: dict[str, queue.SimpleQueue[Job | None]] = {}
        for lane, count in self.room.items():
            self._queues[lane] = queue.SimpleQueue()
            for number in range(count):
                threading.Thread(target=_work, args=(self._queues[lane],), name=f"{lane}-{number}", daemon=True).start()

    def submit(self, lane: str, job: Job) -> None:
        run = contextvars.copy_context().run
        if lane in self._queues:
            self._queues[lane].put(lambda: run(job))
        else:
            threading.Thread(target=run, args=(job,), name=lane, daemon=True).start()

    def close(self) -> None:
        """Let idle threads end; a running job ends its thread when it returns."""
        for lane, jobs in self._queues.items():
            for _ in range(self.room[lane]):
                jobs.put(None)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
