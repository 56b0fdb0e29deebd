"""Files that are on the disk when a function returns, and names that change all at once."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from rlflow.checkpoints.manifest import Entry

CHUNK = 8 << 20  # bytes hashed and written at a time
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> Entry:
    """A new file with these bytes, on the disk. The digest is of what was meant, not of what may have arrived. Raises OSError."""
    digest, total = hashlib.sha256(), 0
    file = os.open(path, NEW, 0o666)
    try:
        for piece in pieces:
            for chunk in _chunks(memoryview(piece)):
                digest.update(chunk)
                _write_all(file, chunk)
                total += len(chunk)
        os.fsync(file)
    finally:
        os.close(file)
    return Entry(bytes=total, sha256=digest.hexdigest())


def _chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]  # a disk that fills takes a part first


def flush_folder(path: Path) -> None:
    """Put the folder's names on the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a filesystem whose folders cannot be flushed
            raise
    finally:
        os.close(folder)


def move(source: Path, target: Path) -> None:
    """Rename within one folder, on the disk. Raises OSError."""
    os.rename(source, target)
    flush_folder(target.parent)


def make_folder(path: Path) -> None:
    """A folder whose name is on the disk. Raises OSError, but not where it exists."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    flush_folder(path.parent)
