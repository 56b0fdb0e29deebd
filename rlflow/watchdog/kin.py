"""Processes that belong to a run: their mark, how they are found, and how they end. The standard library alone: the watchdog starts in
milliseconds.

What a run starts inherits a variable of its environment, through every fork, session and parent that ends. /proc tells who has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

MARK = "RLFLOW_RUN"  # names of the run and of those that it is part of, outermost first, with slashes between
LEFT_ALONE = (b"wandb-core", b"multiprocessing.resource_tracker")  # they end by themselves, when they have sent or removed what is left
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROUNDS = 20  # in which processes are killed, until none has started another meanwhile
PAUSE = 0.05  # seconds between two rounds

Known = tuple[int, str]  # a process: its number, and when it was started, as in Stat


class Stat(NamedTuple):
    """What the kernel says of a process. state: its letter, T for stopped, Z for ended and not yet collected. started: clock ticks since
    the machine's start. status: as ``os.waitpid`` gives it, of one that has ended."""

    state: str
    parent: int
    started: str
    status: int


def stat(pid: int) -> Stat | None:
    """None for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        return Stat(fields[0].decode(), int(fields[1]), fields[19].decode(), int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def started(pid: int) -> str:
    """When a process was started, in clock ticks since the machine's start; empty for a process that has ended, collected or not."""
    status = stat(pid)
    return status.started if status is not None and status.state not in "ZX" else ""


def lives(pid: int, start: str) -> bool:
    """Whether the process that was started at ``start`` runs or is stopped. False where another process has its pid by now."""
    return start != "" and started(pid) == start


def marks(name: str, value: str = "") -> str:
    """The variable's value with one more name; ``value``: what it is now."""
    return f"{value}/{name}" if value else name


def without(name: str, value: str) -> str:
    return "/".join(each for each in value.split("/") if each != name)


def marked(name: str) -> list[int]:
    """Processes that were started with this name in their mark, but for those that are left alone."""
    found, wanted, prefix = [], name.encode(), f"{MARK}=".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read()
                if wanted in environment and any(wanted in item[len(prefix) :].split(b"/") for item in environment.split(b"\0")
                                                 if item.startswith(prefix)) and not left_alone(int(entry)):  # fmt: skip
                    found.append(int(entry))
    return found


def left_alone(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read()
        return any(name in words for name in LEFT_ALONE)
    return False


def command(pid: int) -> str:
    """The first word of a process's command line; empty where it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().partition(b"\0")[0].decode(errors="replace")
    return ""


def descendants(pid: int) -> list[Known]:
    """Children of a process, their children, and so on."""
    children: dict[int, list[Known]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (each := stat(int(entry))) is not None:
            children.setdefault(each.parent, []).append((int(entry), each.started))
    found, rest = list[Known](), [pid]
    while rest:
        more = children.get(rest.pop(), [])
        found += more
        rest += [child for child, _ in more]
    return found


def still(known: list[Known]) -> list[int]:
    """Those that live."""
    return [pid for pid, start in known if lives(pid, start)]


def end_all(found: Callable[[], list[int]]) -> list[int]:
    """Kill what is found, again and again until nothing is; what is left after that."""
    left = running(found())
    for _ in range(ROUNDS):
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)
        left = running(found())
    return left


def running(pids: list[int]) -> list[int]:
    """Those that have not ended."""
    return [pid for pid in pids if pid != os.getpid() and started(pid)]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends, and while this one is stopped (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def adopt() -> None:
    """Become the parent of descendants whose own parents end (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


@contextlib.contextmanager
def here_alone() -> Iterator[None]:
    """What happens inside happens in this process. A child that was forked inside and comes out, by a return or an exception, ends there:
    it must not go on with the work of its parent, and answer in its place."""
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            left = [each for each in (error, error.__cause__) if isinstance(each, SystemExit)]  # which may have been made an error's cause
            _leave(left[0].code if left else 1)
        raise
    finally:
        if os.getpid() != pid:
            _leave(0)


def _leave(code: object) -> None:
    os._exit(code if isinstance(code, int) else int(bool(code)))
