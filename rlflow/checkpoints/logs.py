"""Log files, to which lines are only appended.

If a process is killed, only the last line of the file may be incomplete. The next process removes this line.
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
    """Return True, so that a `Log` with this filter keeps every line."""
    return True


class Log:
    """A file to which lines are appended. The first line creates the file.

    While the disk is full, up to LIMIT bytes of lines wait in memory; later calls write them. ``failed`` is
    called with the error of each failed write.

    ``keep``: filter for the lines that an earlier process wrote. All lines for which it returns False are
    removed before the first new line.
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

        If the text does not fit into the memory for waiting lines, it is lost.
        """
        data = text.encode(errors="backslashreplace")
        with self._turn:
            if self._waiting:
                self._attempt(self._write)
            if len(self._waiting) + len(data) <= LIMIT or not self._waiting:
                self._waiting += data
            self._attempt(self._write)

    def flush(self) -> None:
        """Flush written lines to the disk. Other threads can add lines at the same time."""
        with self._turn:
            file = None if self._file is None else os.dup(self._file)
        if file is not None:
            try:
                self._attempt(lambda: os.fsync(file))
            finally:
                os.close(file)

    def keep_only(self, keep: Keep) -> None:
        """Remove all lines for which ``keep`` returns False. New lines can be added afterwards."""
        with self._turn:
            self._attempt(self._write)
            self._shut()
            # an incomplete line in the file is removed and written again
            self._waiting, self._sent = bytearray(_kept(bytes(self._waiting), keep)), 0
            self._keep, self._cut = keep, False
            self._attempt(self._prepare)

    def close(self) -> None:
        """Write the waiting lines and close the file."""
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

    If the kept lines are the first lines of the file, the function truncates the file, which needs no free
    space. Otherwise, it rewrites the file. If there is no space for a new file, it truncates the file before
    the first removed line.
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
    """Reads the lines of a file that may still grow. Each complete line is returned once.

    ``offset``: number of bytes to skip at the start of the file.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def lines(self) -> list[bytes]:
        """Return the lines that were completed since the last call, without their line breaks.

        Returns [] if the file cannot be read. If the file has shrunk, it is read again from its start.
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
    """Return the complete lines within the last TAIL bytes of a file; [] if the file cannot be read."""
    start = 0
    with contextlib.suppress(OSError):
        start = max(path.stat().st_size - TAIL, 0)
    return [line for line in Growing(path, start).lines()[start > 0 :] if line]


def objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the lines that are JSON objects, parsed; all other lines are skipped."""
    return [value for line in lines if (value := as_object(line)) is not None]


def as_object(text: bytes) -> dict[str, Any] | None:
    """Parse ``text`` and return the JSON object; None if the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path, limit: int = 1 << 30) -> dict[str, Any]:
    """Return the JSON object that is the content of a file.

    Returns {} if the file cannot be read, has more than ``limit`` bytes, or is not a JSON object.
    """
    try:
        return as_object(durable.read(path, limit)) or {}
    except OSError:
        return {}
