"""The heartbeat page: shared memory in which a process records its running nodes for the watchdog.

The watchdog can read it even if the process hangs. Uses only the standard library, because the watchdog loads
this module.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

BEATS = struct.Struct("<Q")
ENTRY = struct.Struct("<Qdq88s")  # number, seconds, iteration, name
NAME = 88  # maximum size of a name in bytes
PLACES = 36  # number of entries in the page; if more nodes run, they are not recorded
SIZE = BEATS.size + PLACES * ENTRY.size


class NodeUnderWay(NamedTuple):
    """A running node, as recorded in the heartbeat page."""

    number: int  # number of the node's run, unique within the process; 0 for an empty entry
    seconds: float  # deadline of the node
    iteration: int
    name: str


class HeartbeatPage:
    """A heartbeat page in the memory behind the file descriptor ``file``.

    If ``file`` is None, nothing is recorded.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = file
        self._memory = mmap.mmap(file, SIZE) if file is not None else None
        self._free = deque(range(PLACES) if file is not None else ())
        self._numbers, self._beats = itertools.count(1), 0
        self._inside = threading.local()

    @classmethod
    def new(cls) -> HeartbeatPage:
        """Return a page in new memory, which is freed when the last process closes it (Linux).

        Raises OSError if there is no memory.
        """
        file = os.memfd_create("rlflow-board")
        try:
            os.ftruncate(file, SIZE)
            return cls(file)
        except OSError:
            os.close(file)
            raise

    # -- the process that works
    # ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, name: str, iteration: int, seconds: float) -> Iterator[None]:
        """Show on the page that this thread runs the node ``name`` while the context lasts.

        ``seconds``: the node's deadline.
        """
        place = self._free_place()
        if place is not None:
            self._put(place, NodeUnderWay(next(self._numbers), seconds, iteration, name))
        try:
            with self.within():
                yield
        finally:
            if place is not None:
                self._put(place, NodeUnderWay(0, 0.0, 0, ""))
                self._free.append(place)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Note that, inside the context, this thread runs part of a node for another thread that waits."""
        outer, self._inside.deep = self.inside, True
        try:
            yield
        finally:
            self._inside.deep = outer

    def _free_place(self) -> int | None:
        """Return the position of a free entry, or None if all are taken."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    @property
    def inside(self) -> bool:
        """Whether this thread is running a node or part of one."""
        return getattr(self._inside, "deep", False)

    def _put(self, place: int, entry: NodeUnderWay) -> None:
        if self._memory is not None:
            name = entry.name.encode()[:NAME]
            ENTRY.pack_into(
                self._memory,
                BEATS.size + place * ENTRY.size,
                entry.number,
                entry.seconds,
                entry.iteration,
                name,
            )

    def beat(self) -> None:
        """Write a heartbeat, which shows that the interpreter's threads can run."""
        self._beats += 1
        if self._memory is not None:
            BEATS.pack_into(self._memory, 0, self._beats)

    # -- the watchdog
    # --------------------------------------------------------------------------------------------------------

    @property
    def beats(self) -> int:
        """How many heartbeats there have been."""
        assert self._memory is not None
        return int(BEATS.unpack_from(self._memory, 0)[0])

    def entries(self) -> list[NodeUnderWay]:
        """Return the running nodes in the order in which they started."""
        assert self._memory is not None
        slots = (ENTRY.unpack_from(self._memory, BEATS.size + place * ENTRY.size) for place in range(PLACES))
        return sorted(
            NodeUnderWay(number, seconds, iteration, name.rstrip(b"\0").decode(errors="replace"))
            for number, seconds, iteration, name in slots
            if number
        )
