"""A process beside the driver that outlives it by seconds: of a local Ray whose driver was killed it ends what does not end by itself, and
takes away the files at which ranks met.

Workers and the controller end with the driver. Ray's agents would look for the controller for another minute.
Run as ``python -m rlflow.cluster.reaper MARK``; the end of standard input is the driver's end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RLFLOW_LOCAL_RAY"  # a variable of the environment, which all processes of a local Ray inherit
SECONDS = 3.0  # for those that end by themselves
TRIES = 10


@contextlib.contextmanager
def reaping(mark: str) -> Iterator[None]:
    """While inside, processes of a Ray that is started here carry the mark, and do not outlive this one."""
    os.environ[MARK] = mark
    words = [sys.executable, "-m", "rlflow.cluster.reaper", mark]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield
        finally:
            os.environ.pop(MARK, None)
            process.kill()
            forget_meetings(mark)  # a second ctrl-C may have kept others from it


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    time.sleep(SECONDS)
    for _ in range(TRIES):
        found = list(marked(f"{MARK}={mark}".encode()))
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(1.0)  # what was being started meanwhile
    forget_meetings(mark)


def forget_meetings(mark: str) -> None:
    """Remove the files in which ranks met."""
    for path in Path(tempfile.gettempdir()).glob(f"rlflow-{mark}-*.meeting"):
        path.unlink(missing_ok=True)


def marked(mark: bytes) -> Iterator[int]:
    """Ray's own processes with this in their environment."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes() and of_ray((entry / "cmdline").read_bytes()):
                yield int(entry.name)


def of_ray(command: bytes) -> bool:
    return command.startswith(b"ray::") or b"/ray/" in command


if __name__ == "__main__":
    main(sys.argv[1])
