"""Append-only log files.

If a process is killed, only the last line can be incomplete. The next process removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlflow.checkpoints import durable

LIMIT = 64 << 20  # maximum number of bytes that wait in memory while the disk is full
TAIL = 256 * 1024  # bytes at the end of a file that `tail` reads
Keep = Callable[[bytes], bool]


def everything(line: bytes) -> bool:
    """Keep every line: a filter for `Log`."""
    return True


class Log:
    """A file to which lines are appended. It is created with the first line.

    While the disk is full, up to LIMIT bytes of lines are kept in memory and written by later calls. Each
    time a write fails, ``failed`` is called with the error.

    ``keep``: a filter for lines from an earlier process. Before the first new line is added, lines for which
    it returns False are removed.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None], keep: Keep = everything) -> None:
        self.path, self._failed, self._keep = path, failed, keep
        self._file: int | None = None
        self._cut = False  # whether the existing lines were filtered by ``keep``
        self._waiting = bytearray()  # complete lines
        self._sent = 0  # bytes of the first waiting line that are already in the file
        self._turn = threading.Lock()  # another thread may call `flush`
        with self._turn:
            self._attempt(self._prepare)

    def add(self, text: str) -> None:
        """Append ``text``, which must end with a line break.

        While the disk is full, text that exceeds the memory limit is lost.
        """
        data = text.encode(errors="backslashreplace")
        with self._turn:
            if self._waiting:
                self._attempt(self._write)
            if len(self._waiting) + len(data) <= LIMIT or not self._waiting:
                self._waiting += data
            self._attempt(self._write)

    def flush(self) -> None:
        """Flush all written lines to disk. Other threads may add lines in the meantime."""
        with self._turn:
            file = None if self._file is None else os.dup(self._file)
        if file is not None:
            try:
                self._attempt(lambda: os.fsync(file))
            finally:
                os.close(file)

    def keep_only(self, keep: Keep) -> None:
        """Remove all lines for which ``keep`` returns False. You can still add lines afterwards."""
        with self._turn:
            self._attempt(self._write)
            self._shut()
            # an incomplete line in the file is removed and written again
            self._waiting, self._sent = bytearray(_kept(bytes(self._waiting), keep)), 0
            self._keep, self._cut = keep, False
            self._attempt(self._prepare)

    def close(self) -> None:
        """Write any lines still in memory, and close the file."""
        with self._turn:
            self._attempt(self._write)
            self._shut()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._failed(error)

    def _prepare(self) -> None:
        if not self._cut:
            cut(self.path, self._keep)
            self._cut = True

    def _write(self) -> None:
        if not self._waiting:
            return
        self._prepare()
        # if the file was deleted, write further lines into a new one
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._shut()
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | durable.PLAIN
            self._file = durable.checked(os.open(self.path, flags, 0o666), self.path)
        while self._waiting:
            # on a nearly full disk, os.write writes only a part
            self._sent += os.write(self._file, bytes(self._waiting[self._sent :]))
            complete = self._waiting.rfind(b"\n", 0, self._sent) + 1
            del self._waiting[:complete]
            self._sent -= complete

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._attempt(lambda: os.close(file))


def _kept(data: bytes, keep: Keep) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if keep(line))


def cut(path: Path, keep: Keep) -> None:
    """Remove incomplete lines and all lines for which ``keep`` returns False. Raises OSError.

    If all kept lines are at the start of the file, the file is truncated, which takes no disk space.
    Otherwise, it is rewritten. If there's no space for that, the file is truncated before the first line to
    remove.
    """
    try:
        size, end, offset, later = path.lstat().st_size, 0, 0, False
        for line in durable.lines(path):
            stays = line.endswith(b"\n") and keep(line)
            later |= stays and end < offset
            offset += len(line)
            end = offset if stays and not later else end
    except FileNotFoundError:
        return None
    if later:
        try:
            return durable.replace(
                path, *(line for line in durable.lines(path) if line.endswith(b"\n") and keep(line))
            )
        except OSError:
            pass  # no space for a new file: truncate as below
    if end < size:
        _truncate(path, end)


def _truncate(path: Path, size: int) -> None:
    file = durable.checked(os.open(path, os.O_WRONLY | durable.PLAIN), path)
    try:
        os.ftruncate(file, size)
        os.fsync(file)
    finally:
        os.close(file)


# -- reading
# ------------------------------------------------------------------------------------------------------------


class Growing:
    """Follows a file that may still grow, and returns each complete line once.

    ``offset``: how many bytes to skip at the start of the file.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def lines(self) -> list[bytes]:
        """Return the lines completed since the last call, without their line breaks.

        Returns [] if the file can't be read. If the file has become shorter, it is read from the start again.
        """
        try:
            with open(durable.open_plain(self._path), "rb") as file:
                self._offset = 0 if os.fstat(file.fileno()).st_size < self._offset else self._offset
                file.seek(self._offset)
                complete = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not complete:
            return []
        self._offset += len(complete) + 1
        return complete.split(b"\n")


def tail(path: Path) -> list[bytes]:
    """Return the complete lines in the last TAIL bytes of a file, or [] if it can't be read."""
    start = 0
    with contextlib.suppress(OSError):
        start = max(path.stat().st_size - TAIL, 0)
    return [line for line in Growing(path, start).lines()[start > 0 :] if line]


def objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Parse the lines that are JSON objects and skip all others."""
    return [value for line in lines if (value := as_object(line)) is not None]


def as_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object, or return None if ``text`` isn't one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path, limit: int = 1 << 30) -> dict[str, Any]:
    """Read a JSON object from a file.

    Returns {} if the file can't be read, is longer than ``limit`` bytes, or isn't a JSON object.
    """
    try:
        return as_object(durable.read(path, limit)) or {}
    except OSError:
        return {}
