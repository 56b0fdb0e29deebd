"""Rows between processes of one machine: the sender writes a frame into memory that both share, and the receiver copies its rows out of it.

The memory is anonymous (memfd): it has no name in any folder, other users cannot open it, and it is gone with the last process that holds
it, however that ends. A receiver opens it through the sender's ``/proc/PID/fd``. Segments are used again, since the kernel needs ten times
as long for fresh memory as a copy takes; together they never have more than ``LIMIT`` bytes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlflow.cluster.rpc.wire import BatchFrame

LIMIT = 1 << 30  # most bytes of shared memory of one sender
SMALL = 64 << 10  # bytes of a frame up to which it goes along with the call
HEAD = 64  # bytes of a segment before the frame: its mark, and whether it is taken
STATE = 8  # the byte that says whether a segment is taken
STEPS = 4  # sizes of segments within each power of two
WASTE = 4  # how many times as large as a frame a segment may be that is used again
OPEN = 64  # segments of others that a receiver keeps open


class SharedFrame(NamedTuple):
    """Where a frame lies: plain numbers, which travel in place of its bytes."""

    pid: int  # of the sender
    descriptor: int  # the sender's, of the segment
    mark: int  # of the segment, against a descriptor that has come to mean another file
    room: int  # bytes of the segment
    size: int  # bytes of the frame


class _Segment:
    """A piece of shared memory of this process."""

    def __init__(self, room: int) -> None:
        self.room, self.mark, self.iteration, self.descriptor = room, secrets.randbits(62), 0, -1
        self.descriptor = os.memfd_create("rlflow-rows")
        os.posix_fallocate(self.descriptor, 0, room)  # now: a write into memory that is not there would end the process
        self.memory = _mapped(self.descriptor, room)
        self.memory[:STATE].view(torch.int64).fill_(self.mark)

    @property
    def taken(self) -> bool:
        """Whether a receiver has still to copy from it."""
        return bool(self.memory[STATE])

    def __del__(self) -> None:
        """Give the memory back; receivers that have it open keep it until they close it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


class SharedOutbox:
    """Frames of this process that others copy. Calls of several threads use it. limit: the most bytes of all segments."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._segments: list[_Segment] = []
        self._limit, self._lock = limit, threading.Lock()

    def post(self, frame: BatchFrame, iteration: int = 0) -> SharedFrame | None:
        """Write a frame for one receiver. Gives None where the bound or the machine leaves no room. iteration: the one that it is for."""
        segment = self._free(HEAD + frame.nbytes, iteration)
        if segment is None:
            return None
        try:
            frame.write(segment.memory[HEAD : HEAD + frame.nbytes])
        except BaseException:
            segment.memory[STATE] = 0
            raise
        return SharedFrame(os.getpid(), segment.descriptor, segment.mark, segment.room, frame.nbytes)

    def _free(self, size: int, iteration: int) -> _Segment | None:
        """A segment with room for so many bytes, which is then taken."""
        with self._lock:
            fitting = [segment for segment in self._segments if size <= segment.room <= WASTE * size and not segment.taken]
            segment = min(fitting, key=lambda segment: segment.room, default=None) or self._made(rounded(size))
            if segment is not None:
                segment.memory[STATE], segment.iteration = 1, iteration
            return segment

    def _made(self, room: int) -> _Segment | None:
        """A new segment, in the place of free ones where the bound asks for that."""
        free = sorted((segment for segment in self._segments if not segment.taken), key=lambda segment: segment.room)
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

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.room for segment in self._segments)

    def clear(self, iteration: int) -> None:
        """Give up what nobody has copied of this iteration and those before it: its receiver failed, or is gone."""
        with self._lock:
            self._segments = [segment for segment in self._segments if not segment.taken or segment.iteration > iteration]


def rounded(size: int) -> int:
    """The bytes of a segment for ``size``: at most a quarter more, so that frames of about one size use one segment after another."""
    step = max(1 << max(size.bit_length() - 1, 0), mmap.PAGESIZE * STEPS) // STEPS
    return -(-size // step) * step


class SharedInbox:
    """Frames of other processes. Calls of several threads use it."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, at: SharedFrame) -> Tensor:
        """The bytes of a frame, uint8 [size], in the sender's memory until ``done``. Raises OSError where they cannot be reached."""
        return self._memory(at)[HEAD : HEAD + at.size]

    def _memory(self, at: SharedFrame) -> Tensor:
        with self._lock:
            key = (at.pid, at.mark)
            if key not in self._open:
                self._open[key] = _opened(at)
            self._open.move_to_end(key)
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
            return self._open[key]

    def done(self, at: SharedFrame) -> None:
        """Say that a frame was copied, so that the sender may use its memory again."""
        self._memory(at)[STATE] = 0


def _opened(at: SharedFrame) -> Tensor:
    descriptor = os.open(f"/proc/{at.pid}/fd/{at.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != at.room:
            raise OSError(f"shared memory of process {at.pid} is gone")
        memory = _mapped(descriptor, at.room)
    finally:
        os.close(descriptor)
    if int(memory[:STATE].view(torch.int64)) != at.mark:
        raise OSError(f"shared memory of process {at.pid} is gone")
    return memory


def _mapped(descriptor: int, room: int) -> Tensor:
    """The memory of a file, uint8 [room]; it stays as long as the tensor or a view of it."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, room), dtype=np.uint8))
