"""Logs: files of lines that only grow. A process that is killed tears at most the last line, which whoever
goes on cuts off."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlflow.checkpoints import durable

LIMIT = 64 << 20  # bytes that wait in memory for room on the disk
TAIL = 256 * 1024  # bytes at the end of a file in which its last lines are looked for
Keep = Callable[[bytes], bool]


def everything(line: bytes) -> bool:
    """A filter that takes every line."""
    return True


class Log:
    """Appends to a file, which is there from the first line on. What a full disk does not take waits, at most
    LIMIT bytes, and is written with later lines; ``failed`` is told of each time that something could not be
    written.

    keep: which of the whole lines that an earlier process wrote are to stay; the others go before anything is
    added.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None], keep: Keep = everything) -> None:
        self.path, self._failed, self._keep = path, failed, keep
        self._file: int | None = None
        self._cut = False  # whether what is there has been judged by ``keep``
        self._waiting = bytearray()  # whole lines
        self._sent = 0  # bytes of the first of them that are in the file
        self._turn = threading.Lock()  # another thread may ask for a flush
        with self._turn:
            self._attempt(self._prepare)

    def add(self, text: str) -> None:
        """Text that ends with the end of a line. What finds no place in memory is lost whole."""
        data = text.encode(errors="backslashreplace")
        with self._turn:
            if self._waiting:
                self._attempt(self._write)
            if len(self._waiting) + len(data) <= LIMIT or not self._waiting:
                self._waiting += data
            self._attempt(self._write)

    def flush(self) -> None:
        """Put what was written on the disk. Who adds lines meanwhile does not wait for that."""
        with self._turn:
            file = None if self._file is None else os.dup(self._file)
        if file is not None:
            try:
                self._attempt(lambda: os.fsync(file))
            finally:
                os.close(file)

    def keep_only(self, keep: Keep) -> None:
        """Leave the lines that ``keep`` says, then go on."""
        with self._turn:
            self._attempt(self._write)
            self._shut()
            # what is torn in the file goes, and comes anew
            self._waiting, self._sent = bytearray(_kept(bytes(self._waiting), keep)), 0
            self._keep, self._cut = keep, False
            self._attempt(self._prepare)

    def close(self) -> None:
        """Write what waits and close the file."""
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
        # it was deleted: what comes goes into a new one
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._shut()
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | durable.PLAIN
            self._file = durable.checked(os.open(self.path, flags, 0o666), self.path)
        while self._waiting:
            # a disk that fills takes a part first
            self._sent += os.write(self._file, bytes(self._waiting[self._sent :]))
            whole = self._waiting.rfind(b"\n", 0, self._sent) + 1
            del self._waiting[:whole]
            self._sent -= whole

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._attempt(lambda: os.close(file))


def _kept(data: bytes, keep: Keep) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if keep(line))


def cut(path: Path, keep: Keep) -> None:
    """Leave of a file the whole lines that ``keep`` says. Where these are its first ones it is cut in place,
    which needs no room on the disk; else it is written anew, and where there is no room for that, cut before
    the first line that goes. Raises OSError."""
    try:
        size, end, offset, later = path.lstat().st_size, 0, 0, False
        for line in durable.lines(path):
            stays = line.endswith(b"\n") and keep(line)
            later |= stays and end < offset
            offset += len(line)
            end = offset if stays and not later else end
    except FileNotFoundError:
        return
    if later:
        try:
            return durable.replace(
                path, *(line for line in durable.lines(path) if line.endswith(b"\n") and keep(line))
            )
        except OSError:
            pass  # as below
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
    """Reads the lines of a file that may still grow, each once and only when it is whole. ``offset``: bytes
    before the first of them."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def lines(self) -> list[bytes]:
        """The lines since the last call, without their ends. A file that cannot be read has none; one that
        has shrunk is read from its beginning."""
        try:
            with open(durable.open_plain(self._path), "rb") as file:
                self._offset = 0 if os.fstat(file.fileno()).st_size < self._offset else self._offset
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not whole:
            return []
        self._offset += len(whole) + 1
        return whole.split(b"\n")


def tail(path: Path) -> list[bytes]:
    """The last whole lines of a file, within TAIL bytes; none where it cannot be read."""
    start = 0
    with contextlib.suppress(OSError):
        start = max(path.stat().st_size - TAIL, 0)
    return [line for line in Growing(path, start).lines()[start > 0 :] if line]


def objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of lines. A line that is torn or damaged is passed over."""
    return [value for line in lines if (value := as_object(line)) is not None]


def as_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object of a text; None for text that is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path, limit: int = 1 << 30) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes; an empty one where the file has none or cannot be
    read."""
    try:
        return as_object(durable.read(path, limit)) or {}
    except OSError:
        return {}
