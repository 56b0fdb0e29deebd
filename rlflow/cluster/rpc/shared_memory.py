"""Rows between processes of one machine: the sender writes a frame into memory that both share, and there the
receiver has its rows: one copy.

The memory is anonymous (memfd): it has no name in any folder, other users cannot open it, and it is gone with
the last process that holds it, however that ends. A receiver opens it through the sender's ``/proc/PID/fd``,
sees it as memory of its own (a page that it writes into is copied) and says when nothing in it is used any
more. Segments are then used again, since the kernel needs ten times as long for fresh memory as a copy takes;
a sender's together never have more than ``LIMIT`` bytes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlflow.author.copy_on_write import FileMemory
from rlflow.cluster.rpc.column_wire import BatchFrame

LIMIT = 1 << 30  # most bytes of shared memory of one sender
# bytes of a frame up to which it goes along with the call: as much as many of them may together
# (`sockets.LARGEST`)
SMALL = 16 << 10
HEAD = 64  # bytes of a segment before the frame: its mark, and whether it is taken
STATE = 8  # the byte that says whether a segment is taken
STEPS = 4  # sizes of segments within each power of two
WASTE = 2  # how many times as large as a frame a segment may be that is used again
# segments that a receiver keeps open for the next frame, and in which rows of one sender stay: each takes
# open files
OPEN = 64


class SharedFrame(NamedTuple):
    """Where a frame lies: plain numbers, which travel in place of its bytes."""

    pid: int  # of the sender
    descriptor: int  # the sender's, of the segment
    mark: int  # of the segment, against a descriptor that has come to mean another file
    room: int  # bytes of the segment
    size: int  # bytes of the frame
    stays: bool = True  # whether rows may stay there; else whoever keeps them copies them


class _Segment:
    """A piece of shared memory of this process."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.mark = secrets.randbits(62)
        self.iteration = 0
        self.over = False
        self.descriptor = -1
        self.descriptor = os.memfd_create("rlflow-rows")
        # now: a write into memory that is not there would end the process
        os.posix_fallocate(self.descriptor, 0, room)
        self.memory = _mapped(self.descriptor, room)
        self.memory[:STATE].view(torch.int64).fill_(self.mark)

    @property
    def in_use(self) -> bool:
        """Whether a receiver has still rows in it."""
        return bool(self.memory[STATE])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Give the memory back; receivers that have it open keep it until they close it."""
        if self.descriptor >= 0:
            close(self.descriptor)


class SharedOutbox:
    """Frames of this process that others read. Calls of several threads use it. limit: the most bytes of all
    segments."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._segments: list[_Segment] = []
        self._limit, self._lock = limit, threading.Lock()

    def post(self, frame: BatchFrame, iteration: int = 0) -> SharedFrame | None:
        """Write a frame for one receiver. Gives None where the bound or the machine leaves no room.
        iteration: the one that it is for."""
        segment = self._free(HEAD + frame.nbytes, iteration)
        if segment is None:
            return None
        try:
            frame.write(segment.memory[HEAD : HEAD + frame.nbytes])
        except BaseException:
            segment.memory[STATE] = 0
            raise
        return SharedFrame(
            os.getpid(), segment.descriptor, segment.mark, segment.room, frame.nbytes, self._roomy()
        )

    def _free(self, size: int, iteration: int) -> _Segment | None:
        """A segment with room for so many bytes, which is then taken."""
        with self._lock:
            fitting = [
                segment
                for segment in self._segments
                if size <= segment.room <= WASTE * size and not segment.in_use
            ]
            segment = min(fitting, key=lambda segment: segment.room, default=None) or self._made(
                rounded(size)
            )
            if segment is not None:
                segment.memory[STATE], segment.iteration, segment.over = 1, iteration, False
            return segment

    def _made(self, room: int) -> _Segment | None:
        """A new segment, in the place of free ones where the bound asks for that."""
        free = sorted(
            (segment for segment in self._segments if not segment.in_use), key=lambda segment: segment.room
        )
        while free and self.nbytes + room > self._limit:
            self._segments.remove(free.pop())
        if self.nbytes + room > self._limit or sys.platform != "linux":
            return None
        try:
            segment = _Segment(room)
        except OSError:
            return None
        self._segments.append(segment)
        return segment

    def _roomy(self) -> bool:
        """Whether room is left for frames that do not stay: half of the bound, and open files."""
        rooms = [segment.room for segment in list(self._segments) if segment.in_use]
        return 2 * sum(rooms) <= self._limit and len(rooms) <= OPEN

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.room for segment in self._segments)

    def clear(self, iteration: int) -> None:
        """This iteration and those before it are over. What is still taken of them at the next such call is
        given up: its receiver failed, is gone, or keeps its rows for longer, and then has their memory
        alone."""
        with self._lock:
            self._segments = [segment for segment in self._segments if not (segment.in_use and segment.over)]
            for segment in self._segments:
                segment.over = segment.over or (segment.in_use and segment.iteration <= iteration)


def rounded(size: int) -> int:
    """The bytes of a segment for ``size``: at most a quarter more, so that frames of about one size use one
    segment after another."""
    step = max(1 << max(size.bit_length() - 1, 0), mmap.PAGESIZE * STEPS) // STEPS
    return -(-size // step) * step


class _Forks:
    """How many processes this one has forked, which see its memory too."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """There is one more."""
        cls.count += 1


# before, and once it has happened: what is opened in between, by another thread, is the fork's too
os.register_at_fork(before=_Forks.note, after_in_parent=_Forks.note, after_in_child=_Forks.note)


class _Opened:
    """A segment of another process."""

    def __init__(self, at: SharedFrame) -> None:
        self.descriptor, self.name = -1, f"/proc/{at.pid}/fd/{at.descriptor}"
        self.descriptor = os.open(self.name, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self.descriptor).st_size != at.room:
            raise OSError(f"shared memory of process {at.pid} is gone")
        self.head = mmap.mmap(self.descriptor, HEAD)
        if int.from_bytes(self.head[:STATE], sys.byteorder) != at.mark:
            raise OSError(f"shared memory of process {at.pid} is gone")

    @property
    def present(self) -> bool:
        """Whether the sender still has it."""
        try:
            return os.path.samestat(os.stat(self.name), os.fstat(self.descriptor))
        except OSError:
            return False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close it. What is mapped of it stays."""
        if self.descriptor >= 0:
            close(self.descriptor)


class _Use:
    """The use that this process makes of a segment. When it ends, the sender may write into the segment
    again, unless a fork of this process may still read it."""

    def __init__(self, segment: _Opened) -> None:
        self._segment, self._forks = segment, _Forks.count

    def __del__(self) -> None:
        """Say that nothing in the segment is used any more."""
        if self._forks == _Forks.count:
            self._segment.head[STATE] = 0


class SharedInbox:
    """Frames of other processes. Calls of several threads use it."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], _Opened] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, at: SharedFrame) -> Tensor:
        """The bytes of a frame, uint8 [size], in the sender's memory, which is not written again as long as a
        view of them is held. Each frame is read once. Raises OSError where it cannot be reached."""
        segment = self._opened(at)
        return FileMemory(segment.descriptor, HEAD + at.size, _Use(segment)).tensor(lendable=at.stays)[HEAD:]

    def _opened(self, at: SharedFrame) -> _Opened:
        with self._lock:
            key = (at.pid, at.mark)
            if key not in self._open:
                self._sweep()
                self._open[key] = _Opened(at)
            self._open.move_to_end(key)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
            return self._open[key]

    def clear(self) -> None:
        """Close what senders have given back, or have left behind: as long as it is open its memory is
        taken."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        for key in [key for key, segment in self._open.items() if not segment.present]:
            del self._open[key]


def _mapped(descriptor: int, room: int) -> Tensor:
    """The memory of a file, uint8 [room]; it stays as long as the tensor or a view of it."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, room), dtype=np.uint8))
