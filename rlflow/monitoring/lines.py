"""Lines of what processes of rewards and services print, from pieces that come from several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

LINE = 2000  # bytes after which a line is cut in two
WAITING = 1000  # lines that wait to be taken; of more the oldest go


class Lines:
    """Puts pieces together into lines. ``add`` is called with each line, without its end, one call at a
    time."""

    def __init__(self, add: Callable[[bytes], object], longest: int = LINE) -> None:
        """``longest``: bytes after which a line is cut in two."""
        self._add, self._longest = add, longest
        self._begun: dict[int, bytes] = {}  # by thread, the line that its process has begun
        self._turn = threading.Lock()

    def hear(self, data: bytes) -> None:
        """Take a piece of what the process of the calling thread prints. An empty piece says that it has
        closed its output."""
        with self._turn:
            thread = threading.get_ident()
            *lines, rest = (self._begun.get(thread, b"") + data).split(b"\n")
            lines += [rest] if rest and (not data or len(rest) > self._longest) else []
            self._begun[thread] = b"" if lines and lines[-1] is rest else rest
            for line in lines:
                self._add(line)

    def close(self) -> None:
        """Add lines that have not ended."""
        with self._turn:
            for rest in filter(None, self._begun.values()):
                self._add(rest)
            self._begun.clear()


class WaitingLines:
    """Lines that a worker sends with its next answer."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=WAITING)
        self.hear = Lines(self._lines.append).hear

    def take(self) -> bytes:
        """All lines that have ended since the last call, each with its end."""
        return b"".join(self._lines.popleft() + b"\n" for _ in range(len(self._lines)))
