"""What a process does, written down where another one reads it without its help: memory that both have. The standard library alone."""

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
NAME = 88  # bytes of a name
PLACES = 36  # entries: as many threads as may do something at once
SIZE = BEATS.size + PLACES * ENTRY.size


class NodeUnderWay(NamedTuple):
    """A node under way. number: no two have the same. seconds: that it may run."""

    number: int
    seconds: float
    iteration: int
    name: str


class Board:
    """``file``: the descriptor of the memory; without one nothing is written, and nobody reads."""

    def __init__(self, file: int | None = None) -> None:
        self.file = file
        self._memory = mmap.mmap(file, SIZE) if file is not None else None
        self._free = deque(range(PLACES) if file is not None else ())
        self._numbers, self._beats = itertools.count(1), 0
        self._inside = threading.local()

    @classmethod
    def new(cls) -> Board:
        """In memory without a name, which goes with the last process that has it (Linux). Raises OSError."""
        file = os.memfd_create("rlflow-board")
        try:
            os.ftruncate(file, SIZE)
            return cls(file)
        except OSError:
            os.close(file)
            raise

    # -- who works ---------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, name: str, iteration: int, seconds: float) -> Iterator[None]:
        """While inside, this thread does the node."""
        place, outer, self._inside.deep = self._taken(), self.inside, True
        if place is not None:
            self._put(place, NodeUnderWay(next(self._numbers), seconds, iteration, name))
        try:
            yield
        finally:
            self._inside.deep = outer
            if place is not None:
                self._put(place, NodeUnderWay(0, 0.0, 0, ""))
                self._free.append(place)

    def _taken(self) -> int | None:
        """A place for an entry; of very many threads at once some have none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    @property
    def inside(self) -> bool:
        """Whether this thread does a node."""
        return getattr(self._inside, "deep", False)

    def _put(self, place: int, entry: NodeUnderWay) -> None:
        if self._memory is not None:
            name = entry.name.encode()[:NAME]
            ENTRY.pack_into(self._memory, BEATS.size + place * ENTRY.size, entry.number, entry.seconds, entry.iteration, name)

    def beat(self) -> None:
        """Say that the interpreter lets its threads run."""
        self._beats += 1
        if self._memory is not None:
            BEATS.pack_into(self._memory, 0, self._beats)

    # -- who watches -------------------------------------------------------------------------------------------------------------

    @property
    def beats(self) -> int:
        """How often has been said that the interpreter runs."""
        assert self._memory is not None
        return int(BEATS.unpack_from(self._memory, 0)[0])

    def entries(self) -> list[NodeUnderWay]:
        """Nodes under way, the one that began first at the front."""
        assert self._memory is not None
        found = (ENTRY.unpack_from(self._memory, BEATS.size + place * ENTRY.size) for place in range(PLACES))
        return sorted(NodeUnderWay(number, seconds, iteration, name.rstrip(b"\0").decode(errors="replace"))
                      for number, seconds, iteration, name in found if number)  # fmt: skip
