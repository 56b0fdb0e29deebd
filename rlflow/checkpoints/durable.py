"""Files that are on the disk when a function returns, and names that change all at once. What a run's folder
gets is written here, so that a process killed anywhere leaves each file as it was or whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlflow.processes.process import Process

CHUNK = 8 << 20  # bytes hashed and written at a time
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link is followed and no pipe is waited for
_ASIDE = re.compile(r"\.(?:writing|removing)-([0-9]{1,10})-([0-9]*)-([0-9a-f]*)-.*")
_LONGEST = 100  # letters of a name that are part of the name aside of it


class Written(NamedTuple):
    """How long a file is and what it hashes to."""

    bytes: int
    sha256: str


def write(path: Path, pieces: Iterable[bytes | memoryview], flush: bool = True) -> Written:
    """Write a new file and flush it to the disk. The digest is computed from ``pieces``, not read back from the
    file. Raises OSError."""
    digest, total = hashlib.sha256(), 0
    file = os.open(path, NEW, 0o666)
    try:
        for piece in pieces:
            for chunk in _chunks(memoryview(piece)):
                digest.update(chunk)
                write_all(file, chunk)
                total += len(chunk)
        if flush:
            os.fsync(file)
    finally:
        os.close(file)
    return Written(total, digest.hexdigest())


def _chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def write_all(file: int, data: memoryview) -> None:
    """Write all of ``data``. Raises OSError, with a part written, where the disk is full."""
    while data:
        data = data[os.write(file, data) :]  # a disk that fills takes a part first


def replace(path: Path, *pieces: bytes, flush: bool = True) -> None:
    """The file with these bytes in place of what it was, all at once and on the disk. Raises OSError; then it
    is as it was. Without ``flush``, for what is soon out of date, nobody waits for the disk, and lost power
    may leave an empty file."""
    beside = aside(path)
    try:
        write(beside, pieces, flush)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    if flush:
        flush_folder(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within one folder, on the disk. Raises OSError."""
    os.rename(source, target)
    flush_folder(target.parent)


def take_place(folder: Path, target: Path) -> None:
    """Rename a folder, all of it flushed and with the rights that the umask gives, to ``target``; what was
    there is removed afterwards. In between there is none for a moment. Raises OSError."""
    give_usual_rights(folder)
    flush_tree(folder)
    old = aside(target, "removing")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    move(folder, target)
    if os.path.lexists(old):
        delete(old)


def give_usual_rights(folder: Path) -> None:
    """Give a folder and all in it the rights that new files and folders of this process have: libraries that
    write weights let nobody else read them. What belongs to others stays as it is. Raises OSError."""
    mask = umask()
    for where, _, names in os.walk(folder, onerror=_raise):
        for path, usual in ((where, 0o777), *((os.path.join(where, name), 0o666) for name in names)):
            mode = os.lstat(path).st_mode
            rights = stat.S_IMODE(mode) & 0o7111 & ~mask | usual & ~mask
            if not stat.S_ISLNK(mode) and rights != stat.S_IMODE(mode):
                with contextlib.suppress(PermissionError):
                    os.chmod(path, rights)


def umask() -> int:
    """The rights that new files of this process do not get."""
    # without a change that other threads see
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_folder(path: Path) -> None:
    """A folder whose name is on the disk. Raises OSError, but not where it exists."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Put the folder's names on the disk. Raises OSError."""
    _flush(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def flush_tree(folder: Path) -> None:
    """Put all that is in a folder on the disk, whoever wrote it. Raises OSError."""
    for where, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            if not os.path.islink(path := os.path.join(where, name)):
                _flush(os.open(path, os.O_RDONLY | PLAIN))
        flush_folder(Path(where))


def _raise(error: OSError) -> None:
    raise error


def _flush(file: int) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a filesystem whose folders cannot be flushed
            raise
    finally:
        os.close(file)


# -- names that say whose they are
# ---------------------------------------------------------------------------------------------


def aside(path: Path, purpose: str = "writing") -> Path:
    """A hidden name beside ``path`` that says which process is writing or removing there."""
    own = Process.this()
    return path.with_name(
        f".{purpose}-{own.pid}-{own.started}-{_short(own.boot)}-{path.name[:_LONGEST]}-{time.monotonic_ns()}"
    )


def _short(boot: str) -> str:
    return boot.replace("-", "")[:12]


def remove(path: Path) -> None:
    """Under a hidden name first: a removal cut short must not look like damage. Raises OSError."""
    hidden = aside(path, "removing")
    os.rename(path, hidden)
    delete(hidden)


def delete(path: Path) -> None:
    """A file, a link or a folder with all that is in it. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear(where: Path, older: float = 0.0) -> None:
    """Remove what processes that are dead left under hidden names, and did not touch for ``older`` seconds.
    Only who alone may write in a folder need not wait: a process of another machine counts as dead. Raises
    OSError."""
    for path in leftovers(where):
        if not older or time.time() - path.lstat().st_mtime > older:
            delete(path)


def leftovers(where: Path) -> list[Path]:
    """Temporary files that dead processes left behind. Raises OSError."""
    own = Process.this()
    paths = []
    for name in os.listdir(where) if where.is_dir() else []:
        match = _ASIDE.fullmatch(name)
        if match:
            owner = Process(
                int(match[1]), match[2], own.boot if match[3] == _short(own.boot) else "", own.space, own.host
            )
            paths += [where / name] if owner.alive() is False else []
    return paths


# -- reading
# ------------------------------------------------------------------------------------------------------------


def open_plain(path: Path) -> int:
    """A regular file for reading. No link is followed and no pipe is waited for. Raises OSError."""
    return checked(os.open(path, os.O_RDONLY | PLAIN), path)


def checked(file: int, path: Path) -> int:
    """The descriptor, where it is of a regular file; else it is closed and OSError raised."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read(path: Path, limit: int = 1 << 30) -> bytes:
    """At most ``limit`` + 1 bytes of a regular file. Raises OSError."""
    with open(open_plain(path), "rb", buffering=0) as file:
        pieces: list[bytes] = []
        left = limit + 1
        while left and (piece := file.read(min(left, CHUNK))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file with their ends. Raises OSError."""
    with open(open_plain(path), "rb") as file:
        yield from file
