"""A section in a process of its own, with a deadline: one that raises, crashes or hangs is told with its
cause, and the others run."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.check import Check, untested

if TYPE_CHECKING:
    from gpu.ground import Ground

LOADED = (
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "rlflow.backends.fsdp",
    "rlflow.runs.resume",
    "rlflow.cluster.weights.same_ranks",
)
STARTED = 60.0  # seconds that a process may take to be there
LAST = 1.0  # seconds before its deadline at which a process says where it is


def context(start: str) -> Any:
    """How processes are started. ``forkserver``: forked from one that has loaded everything, and touched no
    GPU; ``spawn``: anew."""
    found = multiprocessing.get_context(start)
    if start == "forkserver":
        found.set_forkserver_preload(list(LOADED))
    return found


def checks(section: Any, ground: Ground, seconds: float) -> Iterator[Check]:
    """What a section finds, as soon as it does."""
    if lacking := section.missing():
        yield untested(section.name, f"not installed: {', '.join(lacking)}")
        return
    yield from results(
        section.checks, (ground,), ground.start, seconds, ground.folder / f"{section.name}.log"
    )


def results(
    target: Callable[..., Iterator[Any]], arguments: Sequence[Any], start: str, seconds: float, log: Path
) -> Iterator[Any]:
    """What ``target`` gives one by one in another process, whose output goes to ``log``; at last a failed
    check where it does not end well."""
    started = context(start)
    reader, writer = started.Pipe(duplex=False)
    process = started.Process(target=_work, args=(target, arguments, writer, seconds, str(log)))
    process.start()
    writer.close()
    try:
        ended = yield from _received(reader, seconds)
        process.join(5.0 if ended else 0.0)
        if not ended:
            yield Check("deadline", "failed", seconds, "s", why=f"no end; it was in {_place(log)}")
        elif process.exitcode:
            yield Check("exit", "failed", why=f"{_exit(process.exitcode)}: {_last(log)}")
    finally:
        _kill(process)


def _received(reader: Connection, seconds: float) -> Iterator[Any]:
    """All that comes after the word that the process is there, from which on the time counts; whether the
    other end closed in time."""
    until = time.monotonic() + STARTED
    try:
        while reader.poll(max(until - time.monotonic(), 0.0)):
            if (found := reader.recv()) is None:
                until = time.monotonic() + seconds
            else:
                yield found
    except EOFError:
        return True
    return False


def _work(
    target: Callable[..., Iterator[Any]],
    arguments: Sequence[Any],
    writer: Connection,
    seconds: float,
    log: str,
) -> None:
    """In the process. It leads a group, so that what it starts ends with it."""
    os.setpgrp()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    writer.send(None)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(seconds - LAST, LAST))
    try:
        for found in target(*arguments):
            writer.send(found)
    except BaseException as error:
        traceback.print_exc()
        writer.send(
            Check("error", "failed", why=f"{type(error).__name__}: {_first(error)} ({_where(error)})")
        )
    writer.close()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # engines that were started would have their own say about the end


def _kill(process: Any) -> None:
    """And all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _first(error: BaseException) -> str:
    """The first line that says something, of the many that some libraries write."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _last(log: Path, lines: int = 3) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])[-400:]


def _place(log: Path) -> str:
    """The innermost calls of the main thread, whose stack comes last in what faulthandler writes: «File
    "x.py", line 1 in f»."""
    text = log.read_text(errors="replace") if log.exists() else ""
    stack = text.rpartition("(most recent call first):")[2]
    calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
    return " < ".join(f"{file}:{line} in {name}" for file, line, name in calls[:4]) or _last(log)
