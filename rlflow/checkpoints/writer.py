"""Write checkpoints in a background thread.

If a save fails, this is reported and earlier checkpoints are kept. Each checkpoint is written under a
temporary name, flushed to disk, and then renamed. Files that have not changed since an earlier checkpoint
become hard links to it (`rlflow.checkpoints.unchanged`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rlflow.checkpoints import durable, file_names, folder, tensors
from rlflow.checkpoints.manifest import FileEntry, Manifest, encode
from rlflow.checkpoints.reading import verify
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.unchanged import NO_FILES, SavedFiles, unchanged

SHARD = 2 << 30  # maximum size of a file with tensors in bytes
SPARE = 1 << 20  # additional bytes for headers, the manifest and the filesystem


def _shout(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Writer:
    """Saves a run's snapshots in a thread, and keeps the newest ``keep`` intact checkpoints.

    The thread calls ``before`` before writing each checkpoint, and ``on_failure`` with a message whenever it
    fails; the messages are also collected in ``failures``. ``patience``: how many seconds ``submit`` waits
    for the previous snapshot. ``shard_bytes``: maximum size of a file with tensors. Make a writer only in the
    process that holds the run's lock. Raises PlanError if the checkpoints folder is a symbolic link.
    """

    def __init__(
        self,
        run_folder: Path,
        keep: int = 2,
        *,
        on_failure: Callable[[str], None] = _shout,
        before: Callable[[], object] = lambda: None,
        patience: float = 60.0,
        shard_bytes: int = SHARD,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: found {keep}, expected 1 or more")
        self.folder = folder.of_run(run_folder)
        self.keep = keep
        self.patience = patience
        self.shard_bytes = shard_bytes
        self.on_failure, self.before = on_failure, before
        self.failures: list[str] = []
        self.saved: Path | None = None  # the newest checkpoint that this writer has saved
        # why the newest submitted snapshot is not on the disk; empty if it is saved or still being written
        self.missed = ""
        self.in_a_row = 0  # number of snapshots in a row that could not be saved
        self._good: dict[Path, bool] = {}
        self._written: list[SavedFiles] = []  # the newest two checkpoints of this writer, newest last
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._busy = self._closed = False
        self._attempt("removing temporary files of earlier writers", lambda: durable.clear(self.folder))
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Queue a snapshot for writing.

        If the previous snapshot is still being written, wait up to ``patience`` seconds. After that, any
        snapshot waiting in the queue is replaced by this one. Disk errors aren't raised here. Raises
        ValueError if the writer is closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("submit: the writer is closed")
            self._changed.wait_for(self._idle, self.patience)
            passed_over, self._waiting = self._waiting, snapshot
            self._changed.notify_all()
        if passed_over is not None:
            self.in_a_row += 1
            self._fail(
                f"checkpoint of iteration {passed_over.iteration} not saved: saving the one before it took more "
                f"than {self.patience:g} s"
            )

    def wait(self, seconds: float) -> bool:
        """Wait until all submitted snapshots are written or have failed, or return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    def close(self, seconds: float = 600.0) -> bool:
        """Finish the submitted snapshots and end the thread. Return False after ``seconds``.

        In that case, a failure is recorded, and the next writer removes the unfinished files.
        """
        done = self.wait(seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not done:
            self._fail(f"the last checkpoint was not saved within {seconds:g} s")
        else:
            self._thread.join(seconds)
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _idle(self) -> bool:
        return self._waiting is None and not self._busy

    def _work(self) -> None:
        while (snapshot := self._next()) is not None:
            self.missed = self._attempt(
                f"checkpoint of iteration {snapshot.iteration} not saved",
                functools.partial(self._save, snapshot),
            )
            self.in_a_row = self.in_a_row + 1 if self.missed else 0
            del snapshot  # it contains copies of the models, so free it before waiting
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Snapshot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            snapshot, self._waiting = self._waiting, None
            self._busy = snapshot is not None
            return snapshot

    def _attempt(self, what: str, action: Callable[[], None]) -> str:
        """Run ``action`` and return its error as text, or "" if it succeeded.

        The error isn't raised but reported as a failure of ``what``.
        """
        try:
            action()
        except OSError as error:
            failure = f"{what}: {error.strerror or error}" + (
                f" ('{error.filename}')" if error.filename else ""
            )
        except Exception as error:
            failure = f"{what}: {type(error).__name__}: {error}"
        else:
            return ""
        self._fail(failure)
        return failure

    def _fail(self, message: str) -> None:
        self.failures.append(message)
        try:
            self.on_failure(message)
        except Exception as error:
            self.failures.append(f"on_failure raised {type(error).__name__}: {error}")

    def _save(self, snapshot: Snapshot) -> None:
        self.before()
        durable.make_folder(self.folder)
        same = unchanged(snapshot.files, self._linkable())
        self._check_space(snapshot.bytes - sum(entry.bytes for entry in same.entries.values()))
        aside = durable.aside(self.folder / file_names.step(snapshot.iteration))
        pointer = aside.with_name(aside.name + "-latest")
        target = folder.free_name(self.folder, snapshot.iteration)
        try:
            digest, files = write_folder(aside, snapshot, self.shard_bytes, same)
            folder.write_aside(self.folder, folder.Pointer(target.name, digest), pointer.name)
            durable.move(aside, target)  # from here on no more disk space is needed
            durable.move(pointer, self.folder / folder.POINTER)
        except BaseException:
            self._undo(aside, pointer, target)
            raise
        self.saved = target
        self._good[target] = True
        self._written = [*self._written[-1:], SavedFiles(target, files)]
        self._attempt(f"removing checkpoints older than iteration {snapshot.iteration}", self._prune)

    def _undo(self, aside: Path, pointer: Path, target: Path) -> None:
        """Remove the files of a failed save. If ``latest`` already points to the checkpoint, keep it."""
        shutil.rmtree(aside, ignore_errors=True)
        if os.path.lexists(pointer):
            with contextlib.suppress(OSError):  # the original error is reported by the caller
                pointer.unlink()
            shutil.rmtree(target, ignore_errors=True)

    def _linkable(self) -> SavedFiles:
        """Return the checkpoint that the next one may share files with: the last one but one.

        If only one checkpoint is kept, there is no older one to fall back on, so it is the last one.
        """
        if self.keep == 1:
            return self._written[-1] if self._written else NO_FILES
        return self._written[0] if len(self._written) == 2 else NO_FILES

    def _check_space(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < size + SPARE:
            raise OSError(
                errno.ENOSPC,
                f"not enough disk space: found {free} free bytes, expected {size + SPARE}; free "
                "some space or lower --keep",
            )

    def _prune(self) -> None:
        """Keep the newest ``keep`` intact checkpoints and any damaged ones newer than these; remove the rest."""
        count = 1  # the checkpoint just written, which 'latest' names
        for path in folder.steps(self.folder):
            if path == self.saved:
                continue
            if count >= self.keep:
                self._remove(path)
            elif self._is_good(path):
                count += 1

    def _is_good(self, path: Path) -> bool:
        if path not in self._good:
            self._good[path] = not verify(path)
        return self._good[path]

    def _remove(self, path: Path) -> None:
        durable.remove(path)
        self._good.pop(path, None)


def write_folder(
    path: Path, snapshot: Snapshot, shard_bytes: int, same: SavedFiles = NO_FILES
) -> tuple[str, dict[str, FileEntry]]:
    """Write a snapshot to a new folder, and flush it to disk.

    ``shard_bytes``: maximum size of a file with tensors. ``same``: files of an earlier checkpoint to link
    instead of writing them again. The manifest is written last. Returns the sha256 of the manifest, and the
    entries of the other files. Raises OSError.
    """
    os.mkdir(path)
    files: dict[str, FileEntry] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    for group, members in snapshot.tensors.items():
        parts = tensors.shards(members, shard_bytes)
        groups[group] = {}
        for name, part in zip(tensors.shard_names(group, len(parts)), parts, strict=True):
            files[name] = _entry(durable.write(path / name, tensors.pieces(part)))
            groups[group][name] = list(part)
    for inner in sorted({name.partition("/")[0] for name in snapshot.files if "/" in name}):
        os.mkdir(path / inner)
    for name, data in snapshot.files.items():
        linked = name in same.entries and durable.linked(same.folder / name, path / name)
        files[name] = same.entries[name] if linked else _entry(durable.write(path / name, [data]))
    for inner in sorted({name.partition("/")[0] for name in snapshot.files if "/" in name}):
        durable.flush_folder(path / inner)
    manifest = encode(
        Manifest(iteration=snapshot.iteration, files=files, groups=groups, state=dict(snapshot.state))
    )
    digest = durable.write(path / file_names.MANIFEST, [manifest]).sha256
    durable.flush_folder(path)
    return digest, files


def _entry(written: durable.Written) -> FileEntry:
    return FileEntry(bytes=written.bytes, sha256=written.sha256)
