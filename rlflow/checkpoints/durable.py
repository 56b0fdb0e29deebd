"""Write files durably and atomically.

A run writes all files of its folder with these functions. If the process is killed, each file is either
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
    """The length and the digest of a written file."""

    bytes: int
    sha256: str


def write(path: Path, pieces: Iterable[bytes | memoryview], flush: bool = True) -> Written:
    """Create a file, write ``pieces`` into it, and return the file's length and digest.

    ``path`` must not exist. The digest is computed from ``pieces``, not read back from the file. If ``flush``
    is true, the function waits until the file is on the disk. Raises OSError.
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
    """Replace the content of a file atomically with the concatenated ``pieces``.

    Raises OSError; the file is then unchanged. If ``flush`` is false, the function does not wait for the
    disk, and a power failure may leave an empty file. Use this only for data that the run soon writes again.
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
    """Rename a file or folder within one folder, and flush that folder. Raises OSError."""
    os.rename(source, target)
    flush_folder(target.parent)


def take_place(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target`` and delete the previous ``target``.

    Before the rename, the function gives ``folder`` the usual permissions and flushes it to the disk. Between
    the two renames, ``target`` does not exist for a moment. Raises OSError.
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
    """Give a folder and its content the permissions that new files of this process get.

    This is needed because some libraries write weights that other users cannot read. Files that belong to
    other users keep their permissions. Raises OSError.
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
    """Return the umask of this process: the permission bits that the process removes from its new files."""
    # os.umask would change the mask of all threads for a moment
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_folder(path: Path) -> None:
    """Create a folder and flush its name to the disk; do nothing if the folder exists. Raises OSError."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Flush the list of names in a folder to the disk. Raises OSError."""
    _flush(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def flush_tree(folder: Path) -> None:
    """Flush all files in a folder to the disk, even if other processes wrote them. Raises OSError."""
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
    """Return a hidden path next to ``path``, for a file or folder that this process is writing or removing.

    The name begins with ``purpose`` and identifies this process, so that `leftovers` finds it after the
    process died.
    """
    own = Process.this()
    return path.with_name(
        f".{purpose}-{own.pid}-{own.started}-{_short(own.boot)}-{path.name[:_LONGEST]}-{time.monotonic_ns()}"
    )


def _short(boot: str) -> str:
    return boot.replace("-", "")[:12]


def remove(path: Path) -> None:
    """Remove a file or folder. Raises OSError.

    The function first renames the file or folder to a hidden name. A removal that is interrupted therefore
    does not look like damage.
    """
    hidden = aside(path, "removing")
    os.rename(path, hidden)
    delete(hidden)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its content. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear(where: Path, older: float = 0.0) -> None:
    """Delete the files and folders that `leftovers` finds in a folder, if they are older than ``older``
    seconds.

    Processes on other machines count as dead. Therefore only a process with exclusive access to the folder
    may pass 0. Raises OSError.
    """
    for path in leftovers(where):
        if not older or time.time() - path.lstat().st_mtime > older:
            delete(path)


def leftovers(where: Path) -> list[Path]:
    """Return the paths of the temporary files and folders that dead processes left in a folder. Raises
    OSError."""
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
    """Return the descriptor ``file`` if it belongs to a regular file; otherwise close it and raise OSError.

    ``path``: the file's path, for the message.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read(path: Path, limit: int = 1 << 30) -> bytes:
    """Read at most the first ``limit`` + 1 bytes of a regular file and return them. Raises OSError.

    If the result is longer than ``limit``, the file is too long.
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
