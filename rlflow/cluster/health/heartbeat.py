"""What a worker lets others see of it: that it lives, what it does since when, and where its threads are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.process import Process


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's process. stacks: descriptor of its memory file that SIGUSR2 has its stacks written to, which another process of this
    user on the same machine opens by /proc; -1 where there is none."""

    process: Process
    node: str
    stacks: int = -1


class Marks:
    """What is under way, by thread: of calls within a call the innermost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[object, float]]] = {}

    @contextlib.contextmanager
    def during(self, what: object) -> Iterator[None]:
        held = self._open.setdefault(threading.get_ident(), [])
        with self._lock:
            held.append((what, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                held.pop()

    def now(self) -> tuple[tuple[str, float], ...]:
        """(what, for how many seconds) of each thread that does something."""
        moment = time.monotonic()
        with self._lock:
            return tuple((str(held[-1][0]), moment - held[0][1]) for held in self._open.values() if held)


MARKS = Marks()
