"""The lock on a run's folder, which lets only one process use the folder at a time.

The kernel releases the lock when the process dies. On filesystems that don't support locks, a file names the
process instead, and if that process is dead, another one can take over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Self

from rlflow.checkpoints.folder import SMALL
from rlflow.checkpoints.logs import read_object
from rlflow.errors import PlanError, RunHeld
from rlflow.processes.process import Process, parsed

NAME = "run.lock"
_UNABLE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_PAUSE = 0.01  # seconds between two checks of a holder that has not written its name yet


class Lock:
    """The lock on a run's folder. Use ``acquire`` and ``release``, or a ``with`` block.

    ``patience``: how many seconds ``acquire`` waits for a process that hasn't written its name yet or is
    about to release the lock. A forked process shares its parent's lock.
    """

    def __init__(self, run_folder: Path, patience: float = 1.0) -> None:
        self.folder, self.patience = run_folder, patience
        self.path = run_folder / NAME
        self._owner = run_folder / f"{NAME}.owner"  # used only on filesystems without locks
        self._takeover = run_folder / f"{NAME}.takeover"
        self._holder_file = self.path  # the file that names the holder
        self._file: int | None = None
        self._owns = False

    def acquire(self) -> Self:
        """Take the lock and return this object.

        Raises RunHeld if another process holds the lock, and PlanError if the lock's file can't be written.
        """
        deadline = time.monotonic() + self.patience
        try:
            while not self._attempt():
                holder = read_object(self._holder_file, SMALL)
                process = parsed(holder)
                if (process and process.alive() is not False) or time.monotonic() > deadline:
                    raise self._held_error(process, str(holder.get("since")))
                time.sleep(_PAUSE)  # the holder is about to write its name, or to release the lock
        except OSError as error:
            raise PlanError.of(
                "run-lock",
                f"the run '{self.folder}' cannot be locked",
                found=f"{error.strerror} ('{error.filename}')",
                expected="a writable run directory",
                remedy="make the folder writable for this user, or start the run in another folder",
            ) from error
        return self

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a name that stays in the file has no effect
                os.ftruncate(self._file, 0)
            fcntl.flock(
                self._file, fcntl.LOCK_UN
            )  # also releases the lock for forked children, which share it
            os.close(self._file)
        if self._owns:
            self._owner.unlink(missing_ok=True)
        self._file, self._owns = None, False

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _attempt(self) -> bool:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # otherwise the file was deleted in the meantime
            if os.path.samestat(os.fstat(file), os.stat(self.path, follow_symlinks=False)):
                with contextlib.suppress(
                    OSError
                ):  # on a full disk the name is missing, but the kernel holds the lock
                    _write(file)
                self._file, file = file, -1
                return True
            return False
        except OSError as error:
            if error.errno in _UNABLE:
                return self._attempt_without()
            if isinstance(error, BlockingIOError | FileNotFoundError):
                return False
            raise
        finally:
            if file >= 0:
                os.close(file)

    def _attempt_without(self) -> bool:
        """Take the lock on a filesystem without locks, by creating a file exclusively.

        Returns False if the lock is held by a living process. A file left by a dead process is replaced, by
        one process at a time.
        """
        self._holder_file = self._owner
        self._owns = _create(self._owner)
        if self._owns or not self._is_stale() or not _create(self._takeover):
            return self._owns
        aside = self._owner.with_name(f"{self._owner.name}.{os.getpid()}")
        try:
            self._owns = self._is_stale() and _create(aside)
            if self._owns:
                os.replace(aside, self._owner)
            return self._owns
        finally:
            self._takeover.unlink()

    def _is_stale(self) -> bool:
        """Return whether the lock's file was left by a dead process, or was copied along with the folder."""
        values = read_object(self._owner, SMALL)
        process = parsed(values)
        try:
            return process is not None and (
                process.alive() is False or values.get("file") != os.lstat(self._owner).st_ino
            )
        except FileNotFoundError:
            return False

    def _held_error(self, process: Process | None, since: str) -> RunHeld:
        remedy = f"wait for it, or stop it; if it has certainly ended, delete {self.path}*"
        if process is None:
            owner = "a process that has not written its name"
        elif process.alive() is False:
            owner, remedy = (
                f"a child of process {process.pid}, which has ended",
                f"stop it: fuser -v {self.path}",
            )
        else:
            owner = f"process {process.pid} on {process.host} since {since}"
            remedy = f"wait for it, or stop it: kill {process.pid}" if process.alive() else remedy
        error = RunHeld.of(
            "run-held",
            f"another process uses the run directory '{self.folder}'",
            found=owner,
            expected="one process per run directory",
            remedy=remedy,
        )
        assert isinstance(error, RunHeld)
        return error


def _write(file: int) -> None:
    """Write into the lock's file which process holds the lock.

    The key ``file`` is the inode of the lock's file. If it no longer matches, the file is a copy.
    """
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    values = json.loads(Process.this().as_json()) | {"since": since, "file": os.fstat(file).st_ino}
    os.ftruncate(file, 0)
    os.write(file, (json.dumps(values) + "\n").encode())
    os.fsync(file)


def _create(path: Path) -> bool:
    """Create the file with this process's name in it, or return False if it exists. Raises OSError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        _write(file)
    finally:
        os.close(file)
    return True
