"""Rows judged in a child of the worker that is used for no others: what their judging changes is gone with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlflow.isolation import walls
from rlflow.rewards import frames

FAILED = 1
Judge = Callable[[], Any]  # a row's score, or the cause and the words for a missing one


def judged(judges: Sequence[Judge], closed: Sequence[int]) -> Iterator[Any]:
    """What each gives, one after the other in one child, over a pipe of its own. closed: descriptors that the child must not have. Where
    the child ends too early, its row counts as dead, and those after it go to the next child."""
    done = 0
    while done < len(judges):
        child = _Child(judges[done:], closed)
        try:
            while done < len(judges) and (message := child.message()) is not None:
                done += 1
                yield message
        finally:
            ended = child.ended()
        if done < len(judges):
            done += 1
            yield ["died", f"the process that judged it {ended}"]


class _Child:
    def __init__(self, judges: Sequence[Judge], closed: Sequence[int]) -> None:
        self._near, far = os.pipe()
        self._reader = frames.FrameReader(frames.LIMIT)
        self._pid = os.fork()
        if self._pid == 0:
            _work(judges, far, (self._near, *closed))
        os.close(far)

    def message(self) -> Any:
        """The next; None where none comes any more, or it is none."""
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
        """How, in words. A child that does not end is ended with this process, at its row's deadline."""
        os.close(self._near)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code} and no score"


def _work(judges: Sequence[Judge], far: int, closed: Sequence[int]) -> None:
    code = FAILED
    try:
        for descriptor in closed:
            os.close(descriptor)
        walls.around_answers()
        for judge in judges:
            rest = memoryview(frames.packed(judge()))
            while rest:
                rest = rest[os.write(far, rest) :]
        code = 0
    finally:
        os._exit(code)
