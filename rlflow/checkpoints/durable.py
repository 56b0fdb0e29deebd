"""Write files durably and atomically.

A run writes everything in its folder with these functions. If the process is killed, each file is either
unchanged or complete.
"""

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
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # do not follow links or wait for pipes
_ASIDE = re.compile(r"\.(?:writing|removing)-([0-9]{1,10})-([0-9]*)-([0-9a-f]*)-.*")
_LONGEST = 100  # characters of a file's name that its temporary name contains


class Written(NamedTuple):
    """The length and sha256 digest of a file that was written."""

    bytes: int
    sha256: str


def write(path: Path, pieces: Iterable[bytes | memoryview], flush: bool = True) -> Written:
    """Create a file from ``pieces`` and return its length and digest.

    ``path`` must not exist yet. The digest is computed from ``pieces`` rather than read back from the file.
    With ``flush``, wait until the data is on disk. Raises OSError.
    """
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
    """Write all of ``data`` to the file descriptor ``file``.

    Raises OSError, for example if the disk is full; part of the data may then already be in the file.
    """
    while data:
        data = data[os.write(file, data) :]  # on a nearly full disk, os.write writes only a part


def replace(path: Path, *pieces: bytes, flush: bool = True) -> None:
    """Atomically replace a file's content with the concatenated ``pieces``.

    If this raises OSError, the file is unchanged. With ``flush=False``, the call doesn't wait for the disk,
    and a power failure may leave an empty file; use this only for data that the run will soon write again.
    """
    temporary = aside(path)
    try:
        write(temporary, pieces, flush)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if flush:
        flush_folder(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder within its parent folder, and flush the parent. Raises OSError."""
    os.rename(source, target)
    flush_folder(target.parent)


def linked(source: Path, target: Path) -> bool:
    """Make the new path ``target`` a hard link to the file ``source``.

    Returns False if that's impossible, for example on a filesystem without hard links. The caller then
    writes the file.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True


def take_place(folder: Path, target: Path) -> None:
    """Replace the folder ``target`` with ``folder``.

    ``folder`` first gets the default permissions and is flushed to disk. Then ``target`` is moved out of the
    way and deleted, so for a moment it doesn't exist. Raises OSError.
    """
    give_usual_rights(folder)
    flush_tree(folder)
    old = aside(target, "removing")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    move(folder, target)
    if os.path.lexists(old):
        delete(old)


def give_usual_rights(folder: Path) -> None:
    """Give a folder and its content the permissions that this process's new files would get.

    Some libraries write weights that other users can't read. Files owned by other users are left alone.
    Raises OSError.
    """
    mask = umask()
    for where, _, names in os.walk(folder, onerror=_raise):
        for path, usual in ((where, 0o777), *((os.path.join(where, name), 0o666) for name in names)):
            mode = os.lstat(path).st_mode
            rights = stat.S_IMODE(mode) & 0o7111 & ~mask | usual & ~mask
            if not stat.S_ISLNK(mode) and rights != stat.S_IMODE(mode):
                with contextlib.suppress(PermissionError):
                    os.chmod(path, rights)


def umask() -> int:
    """Return this process's umask: the permission bits that its new files don't get."""
    # os.umask would change the mask of all threads for a moment
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_folder(path: Path) -> None:
    """Create a folder if it doesn't exist yet, and flush its parent to disk. Raises OSError."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Flush a folder's list of names to disk. Raises OSError."""
    _flush(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def flush_tree(folder: Path) -> None:
    """Flush all files in a folder to disk, including those written by other processes. Raises OSError."""
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some filesystems cannot flush folders
            raise
    finally:
        os.close(file)


# -- temporary names that identify their process
# ---------------------------------------------------------------------------------------------


def aside(path: Path, purpose: str = "writing") -> Path:
    """Return a hidden path next to ``path``, for something that this process is writing or removing.

    The name starts with ``purpose`` and identifies this process, so `leftovers` can find it if the process
    dies.
    """
    own = Process.this()
    return path.with_name(
        f".{purpose}-{own.pid}-{own.started}-{_short(own.boot)}-{path.name[:_LONGEST]}-{time.monotonic_ns()}"
    )


def _short(boot: str) -> str:
    return boot.replace("-", "")[:12]


def remove(path: Path) -> None:
    """Remove a file or folder. Raises OSError.

    It is first renamed to a hidden name, so that an interrupted removal doesn't look like damage.
    """
    hidden = aside(path, "removing")
    os.rename(path, hidden)
    delete(hidden)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder and its content. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear(where: Path, older: float = 0.0) -> None:
    """Delete the `leftovers` in a folder that are older than ``older`` seconds.

    Processes on other machines are assumed to be dead, so pass 0 only if nobody else can be using the folder.
    Raises OSError.
    """
    for path in leftovers(where):
        if not older or time.time() - path.lstat().st_mtime > older:
            delete(path)


def leftovers(where: Path) -> list[Path]:
    """Return the temporary files and folders that dead processes left behind in a folder. Raises OSError."""
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
    """Open a regular file for reading and return its descriptor.

    Raises OSError for a link, a pipe, or anything else that is not a regular file.
    """
    return checked(os.open(path, os.O_RDONLY | PLAIN), path)


def checked(file: int, path: Path) -> int:
    """Return the file descriptor ``file`` if it refers to a regular file.

    If it doesn't, close it and raise OSError with ``path`` in the message.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read(path: Path, limit: int = 1 << 30) -> bytes:
    """Return the content of a regular file, up to ``limit`` + 1 bytes. Raises OSError.

    A result longer than ``limit`` means that the file is too long.
    """
    with open(open_plain(path), "rb", buffering=0) as file:
        pieces: list[bytes] = []
        left = limit + 1
        while left and (piece := file.read(min(left, CHUNK))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their line breaks. Raises OSError."""
    with open(open_plain(path), "rb") as file:
        yield from file
