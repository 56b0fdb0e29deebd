"""Folders that one user alone reads and writes, in folders that all users write to: nobody else's is ever used, and no link is followed.
The standard library alone: the watchdog starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable

MODE = 0o700
PREFIX = "rlflow-"  # of a run's folder
PLACES = ("/tmp", "/var/tmp")  # beside that of TMPDIR


class NotPrivate(PermissionError):
    """What is there could be another user's, or be changed by one."""


def create(path: str | os.PathLike[str]) -> None:
    """A new folder. Raises FileExistsError where anything has that name, be it a link that leads nowhere; NotPrivate for a place in which
    another user could put something else in its place."""
    check_place(os.path.dirname(os.path.abspath(path)))
    os.mkdir(path, MODE)
    check(path)


def share(path: str | os.PathLike[str]) -> None:
    """The same, or the folder that another process of this user has made. Raises NotPrivate for anything else that is there."""
    try:
        create(path)
    except FileExistsError:
        check(path)


def check(path: str | os.PathLike[str]) -> None:
    """Raises NotPrivate for what is not a folder of this user alone."""
    found, own = os.lstat(path), os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{os.fspath(path)}: found {'a link' if stat.S_ISLNK(found.st_mode) else 'no folder'}, expected a folder")
    if found.st_uid != own:
        raise NotPrivate(f"{os.fspath(path)}: found a folder of user {found.st_uid}, expected one of user {own}")
    if found.st_mode & 0o077:
        raise NotPrivate(f"{os.fspath(path)}: found rights {stat.S_IMODE(found.st_mode):o}, expected {MODE:o}")


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raises NotPrivate for a folder in which other users may rename and remove what is this user's: one that they write to without its
    sticky bit, or that is another user's own. Those of this user's own group may write to it."""
    found = os.stat(folder)
    if found.st_uid not in (0, os.geteuid()):
        raise NotPrivate(f"{os.fspath(folder)}: found a folder of user {found.st_uid}, expected one of this user or of root")
    writers = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != os.getegid() else 0)
    if found.st_mode & writers and not found.st_mode & stat.S_ISVTX:
        raise NotPrivate(f"{os.fspath(folder)}: found rights {stat.S_IMODE(found.st_mode):o}, with which others may replace what "
                         "lies in it, expected its sticky bit")


def place(longest: int = 4096, first: Iterable[str] = ()) -> str:
    """The first folder for temporary files whose path has at most so many bytes, and in which nobody else can replace what this user makes:
    of ``first``, that of TMPDIR, and the system's. Raises NotPrivate with what is wrong with each."""
    wrong = []
    for folder in dict.fromkeys([*first, tempfile.gettempdir(), *PLACES]):
        try:
            check_place(folder)
            if len(os.fsencode(folder)) > longest:
                wrong.append(f"{folder}: longer than {longest} bytes")
            elif not os.access(folder, os.W_OK | os.X_OK):
                wrong.append(f"{folder}: cannot be written to")
            else:
                return folder
        except OSError as error:
            wrong.append(str(error))
    raise NotPrivate("; ".join(wrong))


def remove(path: str | os.PathLike[str]) -> None:
    """A folder of this user and all in it, as far as that can be, and the run's folder in which it was the last; a link in its place, and
    a folder of another user, stay."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
        run = os.path.dirname(path)
        if os.path.basename(run).startswith(PREFIX):
            os.rmdir(run)
