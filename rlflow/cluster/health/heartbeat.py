"""Health data of a worker: its process, and what each of its threads is doing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.processes.process import Process


@dataclass(frozen=True)
class ProcessInfo:
    """What the health monitor needs to know about a worker's process."""

    process: Process
    node: str  # Ray's id of its node
    stacks: int = -1  # descriptor in the worker to which SIGUSR2 writes its stacks; -1 for none


class Marks:
    """What each thread of this process is currently doing.

    If activities are nested, the innermost one counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[object, float]]] = {}

    @contextlib.contextmanager
    def during(self, activity: object) -> Iterator[None]:
        """Set the current thread's activity for the duration of a ``with`` block.

        Messages describe the activity as ``str(activity)``.
        """
        stack = self._open.setdefault(threading.get_ident(), [])
        with self._lock:
            stack.append((activity, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                stack.pop()

    def now(self) -> tuple[tuple[str, float], ...]:
        """Return (activity, seconds) for each thread that has an activity.

        The seconds count from the start of the thread's outermost activity.
        """
        moment = time.monotonic()
        with self._lock:
            return tuple((str(stack[-1][0]), moment - stack[0][1]) for stack in self._open.values() if stack)


MARKS = Marks()
