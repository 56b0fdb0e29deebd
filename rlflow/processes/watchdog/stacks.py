"""The stacks of a process's threads, written by a signal handler that works while C code keeps the
interpreter's lock.

Each thread is signalled and writes its own. A handler in one thread could write those of all, but reads
frames that the others are just
changing: of 1,500 signals to a process with a busy second thread 6 crashed it.

This module imports the standard library alone, since the watchdog loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

SECONDS = 2.0  # how long stacks may take to be written
PAUSE = 0.001  # seconds between two looks at a thread
SIGNAL = signal.SIGUSR2
HEADER = "Stack (most recent call first):\n"  # the line with which the stack of a thread begins
FRAMES = 8  # most frames of a stack that are shown
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# (file, function) → whether what is shown of a stack ends before this frame
Outer = Callable[[str, str], bool]


def show_stacks() -> int:
    """Have SIGUSR2 write the stack of the thread that gets it to a memory file. Gives its descriptor, or -1
    where the system has no such files or the signal is used otherwise."""
    return _file(os.getpid())


@functools.cache
def _file(pid: int) -> int:
    if not hasattr(os, "memfd_create") or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return -1
    file = os.memfd_create("stacks")
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)
    signal.siginterrupt(SIGNAL, False)  # system calls go on after it
    return file


def written(pid: int, file: int) -> str:
    """The stacks that the threads of a process write to its descriptor ``file``, one after another, those of
    Python code alone; what there is after SECONDS. Empty for a process that is gone."""
    path, limit = f"/proc/{pid}/fd/{file}", time.monotonic() + SECONDS
    try:
        before = os.stat(path).st_size
        # the newest first, the main one last
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), reverse=True):
            _ask(pid, thread, limit)
        with open(path, "rb") as dump:
            dump.seek(before)
            return dump.read().decode(errors="replace")
    except OSError:
        return ""


def _ask(pid: int, thread: int, limit: float) -> None:
    """Have a thread write its stack, and wait until it has: while its handler runs, the kernel holds further
    signals of the kind back. Two handlers at a time would leave one of the stacks out. A thread that lets no
    such signal in is left alone."""
    # a thread that has ended; a C library that cannot signal threads
    with contextlib.suppress(OSError, AttributeError):
        if _waits(pid, thread):
            return
        ctypes.CDLL(None).tgkill(pid, thread, SIGNAL)
        # in a row that have found no signal: one can fall between the end of the wait and the beginning of
        # the handler
        looks = 0
        while looks < 2 and time.monotonic() < limit:
            looks = 0 if _waits(pid, thread) else looks + 1
            time.sleep(PAUSE)


def _waits(pid: int, thread: int) -> bool:
    """Whether the signal is on its way to a thread, or is held back there."""
    with open(f"/proc/{pid}/task/{thread}/status") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "SigBlk:"))]
    return any(mask >> (SIGNAL - 1) & 1 for mask in masks)


def shown(dump: str, outer: Outer) -> str:
    """The frames of a dump, as lines, innermost first: of each thread that is inside a frame for which
    ``outer`` holds, the frames inside that one. Other threads are left out."""
    return "\n".join(line for frames in _threads(dump, outer) for line in frames)


def _threads(dump: str, outer: Outer) -> Iterator[list[str]]:
    for thread in dump.split(HEADER):
        frames = [match.groups() for line in thread.splitlines() if (match := FRAME.match(line))]
        last = next((i for i, (path, _, name) in enumerate(frames) if outer(path, name)), None)
        if last is not None:
            yield [f"    {_short(path)}:{line} in {name}" for path, line, name in frames[:last][:FRAMES]]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-3:])
