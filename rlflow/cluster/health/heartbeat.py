"""What a worker shows of itself: its process, and what its threads do for how long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.processes.process import Process


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's process, as the health monitor needs it."""

    process: Process
    node: str  # Ray's id of its node
    stacks: int = -1  # the worker's descriptor to which SIGUSR2 writes its stacks; -1 for none


class Marks:
    """The work of each thread of this process. Of calls within a call, the innermost counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[object, float]]] = {}

    @contextlib.contextmanager
    def during(self, activity: object) -> Iterator[None]:
        """While inside, this thread does the activity, whose text describes it."""
        stack = self._open.setdefault(threading.get_ident(), [])
        with self._lock:
            stack.append((activity, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                stack.pop()

    def now(self) -> tuple[tuple[str, float], ...]:
        """(activity, seconds) of each thread that is at work."""
        moment = time.monotonic()
        with self._lock:
            return tuple((str(stack[-1][0]), moment - stack[0][1]) for stack in self._open.values() if stack)


MARKS = Marks()
