"""Write files durably and atomically.

All files of a run's folder are written with these functions, so a process that is killed leaves each file
either unchanged or complete.
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
    """Write a new file and flush it to the disk. Return its length and digest.

    The digest is computed from ``pieces``, not read back from the file. Raises OSError.
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
    """Write all of ``data``. Raises OSError if the disk is full; part of the data is then already written."""
    while data:
        data = data[os.write(file, data) :]  # on a nearly full disk, os.write writes only a part


def replace(path: Path, *pieces: bytes, flush: bool = True) -> None:
    """Replace a file atomically with one with these bytes, and flush it to the disk.

    If it raises OSError, the file is unchanged. If ``flush`` is false, the function does not wait for the
    disk, and a power failure may leave an empty file; this is for data that are soon out of date.
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
    """Rename a folder to ``target`` and delete the previous ``target``.

    Before renaming, the folder gets the usual permissions and is flushed. For a moment, no ``target`` exists.
    Raises OSError.
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

    This is needed because libraries write weights that other users cannot read. Files that belong to other
    users stay unchanged. Raises OSError.
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
    """Return the umask of this process: the permission bits that its new files do not get."""
    # os.umask would change the mask of all threads for a moment
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_folder(path: Path) -> None:
    """Create a folder if it does not exist, and flush its name to the disk. Raises OSError."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk. Raises OSError."""
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
    """Return a hidden name next to ``path``, which identifies this process.

    The process writes or removes a file or folder under this name.
    """
    own = Process.this()
    return path.with_name(
        f".{purpose}-{own.pid}-{own.started}-{_short(own.boot)}-{path.name[:_LONGEST]}-{time.monotonic_ns()}"
    )


def _short(boot: str) -> str:
    return boot.replace("-", "")[:12]


def remove(path: Path) -> None:
    """Remove a file or folder. Raises OSError.

    The file or folder is first renamed to a hidden name, so that an interrupted removal does not look like
    damage.
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
    """Delete temporary files of dead processes, if they are older than ``older`` seconds.

    Processes on other machines count as dead. Therefore only a process with exclusive access to the folder
    may pass 0. Raises OSError.
    """
    for path in leftovers(where):
        if not older or time.time() - path.lstat().st_mtime > older:
            delete(path)


def leftovers(where: Path) -> list[Path]:
    """Return the paths of temporary files that dead processes left in a folder. Raises OSError."""
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

    Does not follow links or wait for pipes. Raises OSError for anything except a regular file.
    """
    return checked(os.open(path, os.O_RDONLY | PLAIN), path)


def checked(file: int, path: Path) -> int:
    """Return the descriptor if it belongs to a regular file; otherwise close it and raise OSError."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read(path: Path, limit: int = 1 << 30) -> bytes:
    """Read a regular file and return at most its first ``limit`` + 1 bytes. Raises OSError.

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
    """Yield the lines of a regular file, with their line ends. Raises OSError."""
    with open(open_plain(path), "rb") as file:
        yield from file
