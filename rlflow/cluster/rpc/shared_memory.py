"""Rows in shared memory between processes of one machine.

The sender writes a frame into shared memory, and the receiver uses the rows in place, so they are copied only
once. The memory is anonymous (memfd): it has no name in any folder, other users can't open it, and it's freed
when the last process that uses it has ended. A receiver opens it through the sender's ``/proc/PID/fd`` and
maps it privately, so a receiver that writes to a page gets its own copy of that page.

The memory consists of segments. When a receiver is done with a segment, it marks it as unused, and the sender
writes the next frame into it. This matters because allocating new memory takes ten times as long as the copy.
All segments of a sender together have at most ``LIMIT`` bytes.
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
from rlflow.execution.wire.column_wire import BatchFrame

LIMIT = 1 << 30  # maximum size of one sender's shared memory, in bytes
# maximum size in bytes of a frame that is sent inside a call; a call with several such frames must fit into
# `sockets.LARGEST`
SMALL = 16 << 10
HEAD = 64  # bytes of a segment before the frame: its identity, and whether it is in use
STATE = 8  # index of the byte that says whether a segment is in use
STEPS = 4  # sizes of segments within each power of two
WASTE = 2  # a reused segment is at most this many times as large as its frame
# maximum number of segments that a receiver keeps open for later frames, and of segments of one sender in
# which rows may stay; each needs open files
OPEN = 64


class SharedFrame(NamedTuple):
    """Where a frame is in shared memory, as plain numbers. This is sent instead of the frame."""

    pid: int  # pid of the sender
    descriptor: int  # the sender's descriptor of the segment
    mark: int  # identity of the segment, in case the descriptor now belongs to another file
    room: int  # bytes of the segment
    size: int  # bytes of the frame
    stays: bool = True  # whether rows may stay there; otherwise a process that keeps them copies them


class _Segment:
    """A segment of shared memory created by this process."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.mark = secrets.randbits(62)
        self.iteration = 0
        self.over = False
        self.descriptor = -1
        self.descriptor = os.memfd_create("rlflow-rows")
        # allocate now: a write into memory that the machine does not have would kill the process
        os.posix_fallocate(self.descriptor, 0, room)
        self.memory = _mapped(self.descriptor, room)
        self.memory[:STATE].view(torch.int64).fill_(self.mark)

    @property
    def in_use(self) -> bool:
        """Whether a receiver still uses rows in this segment."""
        return bool(self.memory[STATE])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the segment. Receivers that have opened it can still read it."""
        if self.descriptor >= 0:
            close(self.descriptor)


class SharedOutbox:
    """Writes frames into shared memory for other processes. Safe to use from several threads.

    ``limit``: the maximum size of all segments together, in bytes.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._segments: list[_Segment] = []
        self._limit, self._lock = limit, threading.Lock()

    def write(self, frame: BatchFrame, iteration: int = 0) -> SharedFrame | None:
        """Write a frame for one receiver into shared memory, and return where it is.

        Returns None if the limit is reached or the machine has no memory left. ``iteration``: the iteration
        that uses the frame.
        """
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
        """Return a segment of at least ``size`` bytes, marked as in use, or None if there's no memory."""
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
        """Return a new segment of ``room`` bytes, or None if the limit is reached or there's no memory left.

        Unused segments are freed first if that is needed to stay within the limit.
        """
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
        """Return whether receivers may keep rows in shared memory instead of copying them.

        They may as long as at most half of the limit and at most OPEN segments are in use.
        """
        rooms = [segment.room for segment in list(self._segments) if segment.in_use]
        return 2 * sum(rooms) <= self._limit and len(rooms) <= OPEN

    @property
    def nbytes(self) -> int:
        """The size of all segments together, in bytes."""
        return sum(segment.room for segment in self._segments)

    def clear(self, iteration: int) -> None:
        """Note that an iteration and all earlier ones have ended.

        If a segment of these iterations is still in use at the next call, it is dropped. Its receiver has
        failed, has ended, or is keeping the rows, and then it keeps the memory too.
        """
        with self._lock:
            self._segments = [segment for segment in self._segments if not (segment.in_use and segment.over)]
            for segment in self._segments:
                segment.over = segment.over or (segment.in_use and segment.iteration <= iteration)


def rounded(size: int) -> int:
    """Return the size of a segment for a frame of ``size`` bytes.

    Sizes are rounded up by at most a quarter, so that frames of similar size can reuse a segment.
    """
    step = max(1 << max(size.bit_length() - 1, 0), mmap.PAGESIZE * STEPS) // STEPS
    return -(-size // step) * step


class _Forks:
    """Counts the forks of this process, because a fork can still read its memory."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """Count one more fork."""
        cls.count += 1


# before and after: files opened by another thread in between also belong to the fork
os.register_at_fork(before=_Forks.note, after_in_parent=_Forks.note, after_in_child=_Forks.note)


class _Opened:
    """Another process's segment of shared memory, as opened by this process."""

    def __init__(self, at: SharedFrame) -> None:
        self.descriptor, self.name = -1, f"/proc/{at.pid}/fd/{at.descriptor}"
        self.descriptor = os.open(self.name, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self.descriptor).st_size != at.room:
            raise OSError(f"shared memory of process {at.pid} does not exist any more")
        self.head = mmap.mmap(self.descriptor, HEAD)
        if int.from_bytes(self.head[:STATE], sys.byteorder) != at.mark:
            raise OSError(f"shared memory of process {at.pid} does not exist any more")

    @property
    def present(self) -> bool:
        """Whether the sender still has this segment."""
        try:
            return os.path.samestat(os.stat(self.name), os.fstat(self.descriptor))
        except OSError:
            return False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the segment. Memory that is already mapped stays valid."""
        if self.descriptor >= 0:
            close(self.descriptor)


class _Use:
    """This process's use of a segment. When this object is freed, the sender may reuse the segment.

    If this process has forked meanwhile, the segment stays in use, because the child may still read it.
    """

    def __init__(self, segment: _Opened) -> None:
        self._segment, self._forks = segment, _Forks.count

    def __del__(self) -> None:
        """Mark the segment as unused, unless a child of this process may still read it."""
        if self._forks == _Forks.count:
            self._segment.head[STATE] = 0


class SharedInbox:
    """Reads frames that other processes wrote into shared memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], _Opened] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, at: SharedFrame) -> Tensor:
        """Return the bytes of a frame, uint8 [size], as a view of the sender's memory.

        The sender won't overwrite them as long as there is a view. Read each frame only once. Raises OSError
        if the memory no longer exists or can't be opened.
        """
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
        """Close segments that their senders have freed, and segments of processes that have ended.

        Memory still in use stays valid.
        """
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        for key in [key for key, segment in self._open.items() if not segment.present]:
            del self._open[key]


def _mapped(descriptor: int, room: int) -> Tensor:
    """Return an open file's memory, uint8 [room]. It's valid as long as the tensor has a view."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, room), dtype=np.uint8))
