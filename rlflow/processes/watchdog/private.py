"""Private folders in places that everyone can write to, such as /tmp.

Another user's folder is never used, and links aren't followed. Uses only the standard library, because the
watchdog loads this module.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable

MODE = 0o700
PREFIX = "rlflow-"  # prefix of the names of private folders
PLACES = ("/tmp", "/var/tmp")  # folders that are tried after the one in TMPDIR


class NotPrivate(PermissionError):
    """A folder belongs to another user, or another user could change it."""


def create(path: str | os.PathLike[str]) -> None:
    """Create a private folder.

    Raises FileExistsError if the path exists, even as a broken link, and NotPrivate if another user could
    replace the folder.
    """
    check_place(os.path.dirname(os.path.abspath(path)))
    os.mkdir(path, MODE)
    check(path)


def share(path: str | os.PathLike[str]) -> None:
    """Create a private folder, or use the one that another process of this user has created.

    Raises NotPrivate if the path exists but isn't a private folder of this user.
    """
    try:
        create(path)
    except FileExistsError:
        check(path)


def check(path: str | os.PathLike[str]) -> None:
    """Raise NotPrivate unless the path is a folder that this user owns and nobody else can enter."""
    status, user = os.lstat(path), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(
            f"{os.fspath(path)}: found {'a link' if stat.S_ISLNK(status.st_mode) else 'a file'}, "
            "expected a folder"
        )
    if status.st_uid != user:
        raise NotPrivate(
            f"{os.fspath(path)}: found a folder of user {status.st_uid}, expected a folder of user {user}"
        )
    if status.st_mode & 0o077:
        raise NotPrivate(
            f"{os.fspath(path)}: found rights {stat.S_IMODE(status.st_mode):o}, expected {MODE:o}"
        )


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raise NotPrivate if other users could rename or remove this user's entries in ``folder``.

    That is possible in their own folders, and in folders that others can write to without a sticky bit.
    Members of this user's own group are trusted.
    """
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()):
        raise NotPrivate(
            f"{os.fspath(folder)}: found a folder of user {status.st_uid}, expected a folder of this user or "
            "of root"
        )
    writers = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getegid() else 0)
    if status.st_mode & writers and not status.st_mode & stat.S_ISVTX:
        raise NotPrivate(
            f"{os.fspath(folder)}: found rights {stat.S_IMODE(status.st_mode):o}, so that others may "
            "replace its entries, expected its sticky bit"
        )


def place(longest: int = 4096, first: Iterable[str] = ()) -> str:
    """Return the first temporary folder in which other users can't replace this user's files.

    Tries ``first``, then TMPDIR, then the system's folders. ``longest``: the maximum size of the path in
    bytes. If none is suitable, raises NotPrivate with the reason for each.
    """
    problems = []
    for folder in dict.fromkeys([*first, tempfile.gettempdir(), *PLACES]):
        try:
            check_place(folder)
            if len(os.fsencode(folder)) > longest:
                problems.append(f"{folder}: its path is longer than {longest} bytes")
            elif not os.access(folder, os.W_OK | os.X_OK):
                problems.append(f"{folder}: cannot be written to")
            else:
                return folder
        except OSError as error:
            problems.append(str(error))
    raise NotPrivate("; ".join(problems))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove one of this user's folders with its contents, as far as possible.

    If that leaves a run's private folder empty, it is removed too. Links and other users' folders are kept.
    """
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
        run = os.path.dirname(path)
        if os.path.basename(run).startswith(PREFIX):
            os.rmdir(run)
