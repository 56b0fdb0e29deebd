"""The stacks of a process's threads, written by a signal handler that works while C code keeps the interpreter's lock.

This module imports the standard library alone, since the watchdog loads it.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

SECONDS = 2.0  # how long stacks may take to be written
FRAMES = 8  # most frames of a stack that are shown
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
Outer = Callable[[str, str], bool]  # (file, function) → whether what is shown of a stack ends before this frame


def show_stacks() -> int:
    """Have SIGUSR2 write the stacks of all threads to a memory file. Gives its descriptor, or -1 where the system has no such files or the
    signal is used otherwise."""
    return _file(os.getpid())


@functools.cache
def _file(pid: int) -> int:
    if not hasattr(os, "memfd_create") or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return -1
    file = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    signal.siginterrupt(signal.SIGUSR2, False)  # system calls go on after it
    return file


def written(pid: int, file: int, send: Callable[[], object]) -> str:
    """The text that a process writes to its descriptor ``file`` after ``send`` has sent it the signal; empty where it writes nothing within
    SECONDS."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        before = os.stat(path).st_size
        send()
        _wait(path, before)
        with open(path, "rb") as dump:
            dump.seek(before)
            return dump.read().decode(errors="replace")
    except OSError:
        return ""


def _wait(path: str, before: int) -> None:
    """Wait until the file has grown and grows no more."""
    last, limit = before, time.monotonic() + SECONDS
    while time.monotonic() < limit:
        time.sleep(0.005)
        earlier, last = last, os.stat(path).st_size
        if before < earlier == last:
            return


def shown(dump: str, outer: Outer) -> str:
    """The frames of a dump, as lines, innermost first: of each thread that is inside a frame for which ``outer`` holds, the frames inside
    that one. Other threads are left out."""
    return "\n".join(line for frames in _threads(dump, outer) for line in frames)


def _threads(dump: str, outer: Outer) -> Iterator[list[str]]:
    for thread in re.split(r"\n(?=(?:Current )?[Tt]hread )", dump):
        frames = [match.groups() for line in thread.splitlines() if (match := FRAME.match(line))]
        last = next((i for i, (path, _, name) in enumerate(frames) if outer(path, name)), None)
        if last is not None:
            yield [f"    {_short(path)}:{line} in {name}" for path, line, name in frames[:last][:FRAMES]]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-3:])
