"""Faults in real processes: at a chosen call of the operating system the process dies, or the disk is full.

As a script it forks one child for each point, so that torch is imported once: ``python faults.py
kill|limit|lock FOLDER``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WATCHED = ("open", "mkdir", "write", "fsync", "dup", "ftruncate", "rename", "replace", "unlink", "rmdir")
Before = Callable[[str, tuple[Any, ...]], None]
After = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def watching(
    before: Before = lambda name, args: None, after: After = lambda name, args, kwargs, result: None
) -> Iterator[None]:
    """Call ``before`` and ``after`` around each of the watched calls, which still run."""
    real = {name: getattr(os, name) for name in WATCHED}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(name, args)
            result = real[name](*args, **kwargs)
            after(name, args, kwargs, result)
            return result

        return call

    for name in WATCHED:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def below(root: Path, before: Before) -> tuple[Before, After]:
    """Return ``before`` for ``watching``, limited to calls that change paths below ``root`` or files opened
    there."""
    files: set[int] = set()
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def inside(name: str, args: tuple[Any, ...]) -> bool:
        if isinstance(args[0], int):
            return args[0] in files and name != "dup"
        return (name != "open" or bool(args[1] & writing)) and Path(os.fsdecode(args[0])).is_relative_to(root)

    def filtered(name: str, args: tuple[Any, ...]) -> None:
        if inside(name, args):
            before(name, args)

    def after(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "dup":
            (files.add if args[0] in files else files.discard)(result)
        if name == "open":
            there = "dir_fd" not in kwargs and Path(os.fsdecode(args[0])).is_relative_to(root)
            (files.add if there else files.discard)(result)

    return filtered, after


def dying_at(point: int) -> Before:
    """Kill this process at its n-th call; if the call is a write, every second point is in the middle of
    it."""
    real_write, seen = os.write, [0]

    def before(name: str, args: tuple[Any, ...]) -> None:
        if seen[0] == point // 2:
            if point % 2 and name == "write":
                real_write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    return before


def forked(action: Callable[[], None]) -> int:
    """Run an action in a child and return its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(root: Path) -> None:
    """For each point, make a copy of ``root/base`` where a writer of iteration 12 was killed; the last writer
    was not killed."""
    import campaign

    def write() -> None:
        writer = campaign.Writer(run, keep=1, shard_bytes=500)
        with watching(dying_at(point)):
            writer.submit(campaign.example(campaign.NEWER))
            writer.close()

    for point in range(10_000):
        run = shutil.copytree(root / "base", root / f"{point:04d}")
        if forked(write) == 0:
            return


def limit(root: Path) -> None:
    """Do the same with a limit on the size of files: ``root/LIMIT``, with the failures of its writer next to
    it."""
    import campaign

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        with campaign.Writer(run, keep=1, shard_bytes=500, on_failure=lambda message: None) as writer:
            writer.submit(campaign.example(campaign.NEWER))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run.with_suffix(".json").write_text(json.dumps(writer.failures))

    for size in (0, 1, 8, 50, 100, 200, 400, 600, 800, 1000, 1200, 1500, 5000):
        run = shutil.copytree(root / "base", root / f"{size}")
        assert forked(write) == 0


def lock(root: Path, mode: str, rounds: str, processes: int = 8) -> None:
    """Run rounds of processes that compete for one lock; in half of them a dead process's lock exists. Print
    winners and losers."""
    from rlflow.checkpoints.lock import Lock

    if mode == "without":

        def refused(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        fcntl.flock = refused  # like a filesystem without locks

    def stale() -> None:
        Lock(root).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def contend(number: int) -> None:
        for _ in range(int(rounds)):
            start.wait(60)
            held = Lock(root, patience=20)
            try:
                held.acquire()
                answers.put(("won", ""))
            except Exception as error:
                answers.put(("lost", f"{type(error).__name__}: {error}"))
            tried.wait(60)  # the winner holds the lock until all have tried
            held.release()

    context = multiprocessing.get_context("fork")
    start, tried, answers = context.Barrier(processes + 1), context.Barrier(processes), context.Queue()
    children = [context.Process(target=contend, args=(number,), daemon=True) for number in range(processes)]
    for child in children:
        child.start()
    for number in range(int(rounds)):
        if number % 2:
            forked(stale)
        start.wait(60)
        found = [answers.get(timeout=240) for _ in range(processes)]
        said = sorted({text for kind, text in found if kind == "lost"})
        print(json.dumps({"won": sum(kind == "won" for kind, _ in found), "said": said}))
        while number + 1 < int(rounds) and start.n_waiting < processes:  # all have released it
            os.sched_yield()
    for child in children:
        child.join(60)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    {"kill": kill, "limit": limit, "lock": lock}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
