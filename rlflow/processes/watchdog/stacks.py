"""Get the stacks of a process's threads from a signal handler, even if C code holds the interpreter's lock.

Each thread gets a signal and writes its own stack. A single handler could write them all, but it would read
frames that other threads are changing, which can crash the process. Uses only the standard library, because
the watchdog loads this module.
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

SECONDS = 2.0  # time limit for writing stacks
PAUSE = 0.001  # seconds between two checks of a thread
SIGNAL = signal.SIGUSR2
HEADER = "Stack (most recent call first):\n"  # the first line of a thread's stack
FRAMES = 8  # how many frames of a stack are shown
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# (file, function) of a frame → whether the part of the stack that is shown ends before this frame.
Outer = Callable[[str, str], bool]


def show_stacks() -> int:
    """Install a handler for SIGUSR2 that writes the stack of the thread it interrupts to a file in memory.

    Returns the file's descriptor, or -1 if the system has no such files or the signal is already in use.
    """
    return _file(os.getpid())


@functools.cache
def _file(pid: int) -> int:
    if not hasattr(os, "memfd_create") or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return -1
    file = os.memfd_create("stacks")
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)
    signal.siginterrupt(SIGNAL, False)  # interrupted system calls continue
    return file


def written(pid: int, file: int) -> str:
    """Make the threads of a process write their Python stacks, and return the text.

    ``file``: the process's descriptor from ``show_stacks``. Stacks that take longer than SECONDS are missing.
    Empty if the process has ended.
    """
    path, limit = f"/proc/{pid}/fd/{file}", time.monotonic() + SECONDS
    try:
        before = os.stat(path).st_size
        # The newest thread first, the main one last.
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), reverse=True):
            _ask(pid, thread, limit)
        with open(path, "rb") as dump:
            dump.seek(before)
            return dump.read().decode(errors="replace")
    except OSError:
        return ""


def _ask(pid: int, thread: int, limit: float) -> None:
    """Make a thread write its stack, and wait for it, but no longer than until ``limit``.

    Threads write one at a time, because two handlers at once would lose a stack. A thread that blocks the
    signal is skipped.
    """
    # The thread may have ended, or the C library cannot signal threads.
    with contextlib.suppress(OSError, AttributeError):
        if _waits(pid, thread):
            return
        ctypes.CDLL(None).tgkill(pid, thread, SIGNAL)
        # Number of checks in a row that find no pending signal. A single such check may fall between the end
        # of the wait and the start of the handler.
        looks = 0
        while looks < 2 and time.monotonic() < limit:
            looks = 0 if _waits(pid, thread) else looks + 1
            time.sleep(PAUSE)


def _waits(pid: int, thread: int) -> bool:
    """Whether the signal is pending or blocked in a thread."""
    with open(f"/proc/{pid}/task/{thread}/status") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "SigBlk:"))]
    return any(mask >> (SIGNAL - 1) & 1 for mask in masks)


def shown(dump: str, outer: Outer) -> str:
    """Return the frames in a dump of stacks as lines, innermost first.

    For each thread, only frames further in than the first one for which ``outer`` is true are included.
    Threads without such a frame are skipped.
    """
    return "\n".join(line for frames in _threads(dump, outer) for line in frames)


def _threads(dump: str, outer: Outer) -> Iterator[list[str]]:
    for thread in dump.split(HEADER):
        frames = [match.groups() for line in thread.splitlines() if (match := FRAME.match(line))]
        last = next((i for i, (path, _, name) in enumerate(frames) if outer(path, name)), None)
        if last is not None:
            yield [f"    {_short(path)}:{line} in {name}" for path, line, name in frames[:last][:FRAMES]]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-3:])
