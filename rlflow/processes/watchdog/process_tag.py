"""Find and end the processes of a run by their process tag.

The tag is an environment variable that every process started by a run inherits, even through forks and new
sessions, and keeps after its parent has ended. /proc shows which processes have it. Ray's processes can
overwrite it with their titles, so they are recognised by the run's files that they have open. This module
reads /proc directly instead of using psutil, because the watchdog loads it and must start within
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# The variable of the tag: the names of a run and of the runs around it, the outermost first, separated by
# slashes.
MARK = "RLFLOW_RUN"
RAY = "ray::"  # prefix of the titles of Ray processes
RAYLET = "RAY_RAYLET_PID"  # the variable in which Ray names the process that starts its workers and agents
# Commands that end by themselves once they have sent or removed everything; they are not killed.
LEFT_ALONE = (b"wandb-core", b"multiprocessing.resource_tracker")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROUNDS = 20  # most rounds of killing processes, since these may start others in the meantime
PAUSE = 0.05  # seconds between two rounds
STARTING = 20  # most checks of a child whose environment is not visible yet

Known = tuple[int, str]  # (pid, start time) of a process; the start time as in Stat


class Stat(NamedTuple):
    """What the kernel says about a process."""

    state: str  # state as a letter: T for stopped, Z for ended and not yet reaped, …
    parent: int  # pid of the parent
    started: str  # clock ticks from the machine's start to the process's start
    status: int  # for a process that has ended: exit status in the form of ``os.waitpid``


def stat(pid: int) -> Stat | None:
    """Return what the kernel says about a process, or None if it doesn't exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may contain anything
        return Stat(fields[0].decode(), int(fields[1]), fields[19].decode(), int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def started(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine's boot, or "" if it has ended."""
    status = stat(pid)
    return status.started if status is not None and status.state not in "ZX" else ""


def lives(pid: int, start: str) -> bool:
    """Whether the process with this pid and start time still exists, running or stopped.

    False if the pid now belongs to another process.
    """
    return start != "" and started(pid) == start


def marks(name: str, value: str = "") -> str:
    """Return the value of the process tag with ``name`` added to ``value``."""
    return f"{value}/{name}" if value else name


def without(name: str, value: str) -> str:
    """Return the value of the process tag with ``name`` removed from ``value``."""
    return "/".join(part for part in value.split("/") if part != name)


def _pids() -> Iterator[int]:
    """Return an iterator over the pids of all processes on this machine."""
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def marked(name: str) -> list[int]:
    """Return the pids of all processes with ``name`` in their process tag.

    Processes that run a command in ``LEFT_ALONE`` are left out.
    """
    pids, encoded, prefix = [], name.encode(), f"{MARK}=".encode()
    for pid in _pids():
        environment = _environment(pid)
        if (
            encoded in environment
            and any(
                encoded in item[len(prefix) :].split(b"/")
                for item in environment.split(b"\0")
                if item.startswith(prefix)
            )
            and not left_alone(pid)
        ):
            pids.append(pid)
    return pids


def of_ray(folders: Iterable[str]) -> list[int]:
    """Return the pids of Ray's processes that have files in these folders open."""
    below = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)
    return [pid for pid in _pids() if command(pid).startswith(RAY) and _has_open(pid, below)]


def _has_open(pid: int, below: tuple[str, ...]) -> bool:
    """Whether a process has an open file whose path starts with one of ``below``."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it may be closed in the meantime
                if os.readlink(f"/proc/{pid}/fd/{entry}").startswith(below):
                    return True
    return False


def _environment(pid: int) -> bytes:
    """Return the environment that a process was started with.

    Empty if the process has ended or belongs to another user.
    """
    for _ in range(STARTING):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            return b""
        status = stat(pid)
        if environment or status is None or status.state in "ZX" or status.parent != os.getpid():
            return environment
        # A child of this process may be in its exec: the kernel shows the new environment a moment after it
        # closes pipes.
        time.sleep(PAUSE)
    return b""


def left_alone(pid: int) -> bool:
    """Whether a process runs a command in ``LEFT_ALONE``, and so ends by itself."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read()
        return any(name in words for name in LEFT_ALONE)
    return False


def command(pid: int) -> str:
    """Return the first word of a process's command line, or "" if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().partition(b"\0")[0].decode(errors="replace")
    return ""


def descendants(pid: int) -> list[Known]:
    """Return (pid, start time) of all descendants of a process."""
    children: dict[int, list[Known]] = {}
    for child in _pids():
        if (status := stat(child)) is not None:
            children.setdefault(status.parent, []).append((child, status.started))
    below, unvisited = list[Known](), [pid]
    while unvisited:
        next_children = children.get(unvisited.pop(), [])
        below += next_children
        unvisited += [child for child, _ in next_children]
    return below


def still(processes: list[Known]) -> list[int]:
    """Return the pids of those processes, given as (pid, start time), that still exist."""
    return [pid for pid, start in processes if lives(pid, start)]


def end_all(find: Callable[[], list[int]]) -> list[int]:
    """Kill the processes that ``find`` returns, again and again until it finds none.

    Returns the pids that are left after ``ROUNDS`` rounds.
    """
    survivors = running(find())
    for _ in range(ROUNDS):
        if not survivors:
            break
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)
        survivors = running(find())
    return survivors


def running(pids: list[int]) -> list[int]:
    """Return the pids whose processes are still there, leaving out this process."""
    return [pid for pid in pids if pid != os.getpid() and started(pid)]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux).

    This works however the parent ends, and even while this process is stopped. ``parent``: the parent's pid.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had already ended before the request
        os._exit(1)


def die_with_raylet() -> None:
    """Have the kernel kill this process, which Ray started, when the raylet ends.

    This process's parent is the raylet or a process that ends with it. If the raylet is already gone, this
    process ends at once.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and not started(int(os.environ.get(RAYLET, os.getppid()))):
        os._exit(1)


def adopt() -> None:
    """Make this process the parent of descendants whose own parents end (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


@contextlib.contextmanager
def here_alone() -> Iterator[None]:
    """Keep children that are forked inside the context from leaving it.

    A child exits when it leaves the context or raises an exception. Otherwise, it would go on with its
    parent's work and send answers in its place.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            # An exit may be the cause of another error.
            exits = [raised for raised in (error, error.__cause__) if isinstance(raised, SystemExit)]
            _leave(exits[0].code if exits else 1)
        raise
    finally:
        if os.getpid() != pid:
            _leave(0)


def _leave(code: object) -> None:
    os._exit(code if isinstance(code, int) else int(bool(code)))
