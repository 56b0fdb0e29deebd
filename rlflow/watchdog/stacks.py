"""Where the threads of a process are, written by a signal that needs no help of its interpreter. The standard library alone."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

SECONDS = 2.0  # how long stacks may take to be written
FRAMES = 8  # of a stack that are shown
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
Outer = Callable[[str, str], bool]  # whether a frame, by its file and function, is where what is shown of a stack ends


def show_stacks() -> int:
    """Have SIGUSR2 write the stacks of all threads, where it means nothing else. The descriptor of the file, a memory's without a name; -1
    where there is none."""
    return _file(os.getpid())


@functools.cache
def _file(pid: int) -> int:
    if not hasattr(os, "memfd_create") or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return -1
    file = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    signal.siginterrupt(signal.SIGUSR2, False)  # what is written down is not woken by it, where the system can help it
    return file


def written(pid: int, file: int, send: Callable[[], object]) -> str:
    """What a process writes to its descriptor ``file`` once ``send`` has sent it the signal; nothing where it writes nothing."""
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
    """Until the file has grown and grows no more."""
    last, limit = before, time.monotonic() + SECONDS
    while time.monotonic() < limit:
        time.sleep(0.005)
        earlier, last = last, os.stat(path).st_size
        if before < earlier == last:
            return


def shown(dump: str, outer: Outer) -> str:
    """Of each thread that is within such a frame the frames inside of it, the innermost first; of the others none."""
    return "\n".join(line for frames in _threads(dump, outer) for line in frames)


def _threads(dump: str, outer: Outer) -> Iterator[list[str]]:
    for thread in re.split(r"\n(?=(?:Current )?[Tt]hread )", dump):
        frames = [found.groups() for line in thread.splitlines() if (found := FRAME.match(line))]
        last = next((i for i, (path, _, name) in enumerate(frames) if outer(path, name)), None)
        if last is not None:
            yield [f"    {_short(path)}:{line} in {name}" for path, line, name in frames[:last][:FRAMES]]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-3:])
