"""Run a section in its own process with a deadline.

If a section raises, crashes or hangs, this becomes a failed check, and the other sections still run.
"""

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
STARTED = 60.0  # most seconds until a process has started
LAST = 1.0  # seconds before its deadline at which a process prints its stack


def context(start: str) -> Any:
    """Return the multiprocessing context of a start method.

    ``forkserver``: fork from a process that has imported everything and has not used a GPU. ``spawn``: start
    a new interpreter.
    """
    found = multiprocessing.get_context(start)
    if start == "forkserver":
        found.set_forkserver_preload(list(LOADED))
    return found


def checks(section: Any, ground: Ground, seconds: float) -> Iterator[Check]:
    """Yield the checks of a section, each as soon as the section makes it."""
    if lacking := section.missing():
        yield untested(section.name, f"not installed: {', '.join(lacking)}")
        return
    yield from results(
        section.checks, (ground,), ground.start, seconds, ground.folder / f"{section.name}.log"
    )


def results(
    target: Callable[..., Iterator[Any]], arguments: Sequence[Any], start: str, seconds: float, log: Path
) -> Iterator[Any]:
    """Run ``target`` in another process, and yield its results one by one.

    ``log``: the file for the output of the process. If ``target`` raises, crashes or exceeds ``seconds``, the
    last result is a failed check.
    """
    started = context(start)
    reader, writer = started.Pipe(duplex=False)
    process = started.Process(target=_work, args=(target, arguments, writer, seconds, str(log)))
    process.start()
    writer.close()
    try:
        ended = yield from _received(reader, seconds)
        process.join(5.0 if ended else 0.0)
        if not ended:
            yield Check("deadline", "failed", seconds, "s", why=f"did not end; it was in {_place(log)}")
        elif process.exitcode:
            yield Check("exit", "failed", why=f"{_exit(process.exitcode)}: {_last(log)}")
    finally:
        _kill(process)


def _received(reader: Connection, seconds: float) -> Iterator[Any]:
    """Yield the results that the process sends.

    The generator's return value is whether the process ended in time. The time limit ``seconds`` starts with
    the first message, which says that the process has started.
    """
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
    """Run the target in the new process, which leads a process group, so that its children can be killed with
    it.
    """
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
    os._exit(0)  # skip exit handlers of engines, which may hang or change the exit code


def _kill(process: Any) -> None:
    """Kill the process and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _first(error: BaseException) -> str:
    """Return the first non-empty line of an error message, cut to 300 characters."""
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
    """Return the innermost calls of the main thread, from faulthandler's output in the log.

    faulthandler prints the main thread's stack last, with lines such as: File "x.py", line 1 in f.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    stack = text.rpartition("(most recent call first):")[2]
    calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
    return " < ".join(f"{file}:{line} in {name}" for file, line, name in calls[:4]) or _last(log)
