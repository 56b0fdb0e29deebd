"""Join pieces of output into lines, even if several threads read the output of different processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

LINE = 2000  # bytes after which a line is split
WAITING = 1000  # how many lines can wait; beyond that, the oldest are dropped


class Lines:
    """Joins pieces of output into lines, and calls ``add`` with each line, without the newline.

    ``add`` is only called by one thread at a time.
    """

    def __init__(self, add: Callable[[bytes], object], longest: int = LINE) -> None:
        """``add`` gets each line. ``longest``: the number of bytes after which a line is split."""
        self._add, self._longest = add, longest
        self._begun: dict[int, bytes] = {}  # thread → the unfinished line of its process
        self._turn = threading.Lock()

    def on_output(self, data: bytes) -> None:
        """Take a piece of output from the process that the calling thread reads.

        An empty piece means that the process closed its output.
        """
        with self._turn:
            thread = threading.get_ident()
            *lines, rest = (self._begun.get(thread, b"") + data).split(b"\n")
            lines += [rest] if rest and (not data or len(rest) > self._longest) else []
            self._begun[thread] = b"" if lines and lines[-1] is rest else rest
            for line in lines:
                self._add(line)

    def close(self) -> None:
        """Call ``add`` with the lines that are still unfinished."""
        with self._turn:
            for rest in filter(None, self._begun.values()):
                self._add(rest)
            self._begun.clear()


class WaitingLines:
    """Collects lines in a worker, which sends them along with its next answer."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=WAITING)
        self.on_output = Lines(self._lines.append).on_output

    def take(self) -> bytes:
        """Return the lines completed since the last call, each with its newline."""
        return b"".join(self._lines.popleft() + b"\n" for _ in range(len(self._lines)))
