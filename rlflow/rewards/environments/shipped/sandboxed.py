"""Runs untrusted code in a separate sandboxed process, and collects its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from rlflow.processes.children import Child
from rlflow.processes.sandbox import limits
from rlflow.processes.watchdog.process_tag import MARK

PROGRAM = "rlflow.rewards.environments.shipped.sandbox"
OUTPUT = 1 << 20  # maximum number of bytes of each stream that are kept; the rest is read and discarded


class Ended(NamedTuple):
    """How a process that ran code ended, and its output."""

    late: bool  # whether the process was killed at its deadline
    code: int  # exit code; if a signal ended the process, the negative number of the signal
    stdout: str
    stderr: str
    seconds: float


def ended(code: str, folder: str, megabytes: int, seconds: float, stdin: str = "") -> Ended:
    """Run code in a sandboxed process whose working folder is ``folder``.

    The code may read files in this folder. Returns the output and how the process ended. ``megabytes``:
    memory limit. ``seconds``: how long to wait before killing the process. ``stdin``: text for standard
    input. Raises OSError if the process can't be started, and UnicodeEncodeError for strings with lone
    surrogates.
    """
    with (
        tempfile.NamedTemporaryFile(dir=Path(folder).parent) as source,
        tempfile.TemporaryFile(dir=folder) as given,
    ):
        for file, text in ((source, code), (given, stdin)):
            file.write(text.encode())
            file.seek(0)
        command = [
            sys.executable,
            "-P",
            "-m",
            PROGRAM,
            str(os.getpid()),
            folder,
            str(megabytes),
            str(seconds),
            source.name,
        ]
        began = time.monotonic()
        child = Child(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=limits.environment(folder, [MARK]),
        )
        streams = [_Stream(stream) for stream in (child.stdout, child.stderr) if stream is not None]
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.signal_group()
        late = child.wait() == -signal.SIGKILL and time.monotonic() - began >= seconds
        stdout, stderr = (stream.text() for stream in streams)
    return Ended(late, child.returncode, stdout, stderr, time.monotonic() - began)


class _Stream:
    """Reads a stream to its end in a thread, keeping only the first OUTPUT bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept, self._stream = bytearray(), stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while data := self._stream.read1(1 << 16):  # type: ignore[attr-defined]
                self._kept += data[: OUTPUT - len(self._kept)]

    def text(self) -> str:
        """Wait for the end of the stream, and return the kept part as text."""
        self._thread.join()
        return self._kept.decode(errors="replace")
