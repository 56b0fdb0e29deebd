"""Scores rows in a forked child of the worker process, which exits afterwards.

Nothing that scoring changes in the child's memory reaches the worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlflow.processes.sandbox import sandboxes
from rlflow.rewards import frames

FAILED = 1
# called without arguments; returns a row's score, or (cause, message) for a missing score
Judge = Callable[[], Any]


def judged(judges: Sequence[Judge], closed: Sequence[int]) -> Iterator[Any]:
    """Call each judge in a forked child, and yield the results in order.

    A judge is a function without arguments that scores one row. ``closed``: file descriptors that the child
    closes first. If the child dies while scoring a row, that row's result is ["died", message], and a new
    child scores the remaining rows.
    """
    count = 0
    while count < len(judges):
        child = _Child(judges[count:], closed)
        try:
            while count < len(judges) and (message := child.message()) is not None:
                count += 1
                yield message
        finally:
            ending = child.ended()
        if count < len(judges):
            count += 1
            yield ["died", f"the process that scored it {ending}"]


class _Child:
    """A forked child that calls judges and sends their results through a pipe."""

    def __init__(self, judges: Sequence[Judge], closed: Sequence[int]) -> None:
        self._near, far = os.pipe()
        self._reader = frames.FrameReader(frames.LIMIT)
        self._pid = os.fork()
        if self._pid == 0:
            _work(judges, far, (self._near, *closed))
        os.close(far)

    def message(self) -> Any:
        """Return the child's next result, or None at the end of the pipe or if the bytes aren't a message."""
        try:
            while (body := self._reader.next()) is None:
                data = os.read(self._near, 1 << 16)
                if not data:
                    return None
                self._reader.feed(data)
            return frames.unpacked(body)
        except ValueError:
            return None

    def ended(self) -> str:
        """Wait until the child has ended, and say how: "exited with code …" or "was killed by signal …".

        If the child hangs, the pool kills it together with this worker at the row's deadline.
        """
        os.close(self._near)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code} without a score"


def _work(judges: Sequence[Judge], far: int, closed: Sequence[int]) -> None:
    """In the child, close ``closed``, enter the sandbox, write each judge's result to ``far``, and exit."""
    code = FAILED
    try:
        for descriptor in closed:
            os.close(descriptor)
        sandboxes.around_answers()
        for judge in judges:
            unsent = memoryview(frames.packed(judge()))
            while unsent:
                unsent = unsent[os.write(far, unsent) :]
        code = 0
    finally:
        os._exit(code)
