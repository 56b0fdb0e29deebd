"""A run's identity: all inputs that affect its numbers, other than its settings and its graph.

It covers model files, data, code, packages and the machine. Each part has a name, which `rlflow resume`
prints if the part has changed. Digests of weights are computed in a thread while the run starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlflow.checkpoints import durable
from rlflow.errors import printable

FILE = "identity.json"
GONE = "nothing"
UNREAD = "not read before the run was stopped"
UNSTEADY = "changed while it was read"
SHOWN = 60  # characters of a value that messages show


class WeightFile(BaseModel):
    """A weights file, described by its size, times and inode, without reading it.

    As long as these stay the same, the file counts as unchanged and isn't read again.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: int
    modified: int  # when its content last changed, in nanoseconds since the epoch
    changed: int  # when its inode last changed, in nanoseconds since the epoch
    inode: int
    # True if the file changed so recently that another change could get the same time
    recent: bool = False
    # digest of its bytes, or None if it hasn't been read yet
    sha256: Annotated[str, Field(pattern=rf"^([0-9a-f]{{64}}|{UNSTEADY})$")] | None = None

    def same_file(self, other: WeightFile) -> bool:
        """Return whether both describe the same unchanged file, judging by size, times and inode."""
        return (self.bytes, self.modified, self.changed, self.inode) == (
            other.bytes,
            other.modified,
            other.changed,
            other.inode,
        )

    def with_digest(self, digits: str | None) -> WeightFile:
        """Return a copy with ``digits`` as the file's sha256."""
        return self.model_copy(update={"sha256": digits})


class Identity(BaseModel):
    """The inputs that affect a run's numbers, by name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal["rlflow-identity"] = "rlflow-identity"
    version: Literal[1] = 1
    kept: dict[str, str] = Field(default_factory=dict)  # parts that must be the same on resume
    # parts that may change but are then reported, such as package versions
    told: dict[str, str] = Field(default_factory=dict)
    # files of weights, compared by their digests
    weights: dict[str, WeightFile] = Field(default_factory=dict)

    def encode(self) -> bytes:
        """Encode the identity as the content of identity.json."""
        return f"{json.dumps(self.model_dump(), indent=1)}\n".encode()


@dataclass(frozen=True)
class Change:
    """A part of the identity that has changed. ``str()`` describes the change in one line."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {shortened(self.before)} → {shortened(self.now)}")


def shortened(value: str) -> str:
    """Shorten a value for messages, to the first digits of a digest or the start of a long text."""
    kind, _, digits = value.partition(" ")
    if kind == "sha256":
        return f"sha256 {digits[:12]}"
    return value if len(value) <= SHOWN else value[: SHOWN - 1] + "…"


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return the parts that have changed, disappeared or been added.

    ``before``, ``now``: the value of each part, by name.
    """
    names = list(dict.fromkeys((*before, *now)))
    return [
        Change(name, before.get(name, GONE), now.get(name, GONE))
        for name in names
        if before.get(name) != now.get(name)
    ]


def read(folder: Path) -> Identity | None:
    """Read the identity recorded in a run's folder, or return None if there is none.

    Raises ValueError if it is damaged or has a different version.
    """
    try:
        return Identity.model_validate_json(durable.read(folder / FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise ValueError(f"{FILE} cannot be read: {reason}") from error


PIECE = 1 << 20  # bytes that are read at a time
RECENT = 2 * 10**9  # nanoseconds in which two changes may get the same time
NICE = 10  # nice value of the thread that reads weights during a run
LARGE = 1 << 30  # bytes; reading more than this is reported
AT_ONCE = 4  # files that are read at once while a run waits for them


def weight_file(path: Path, clock: Callable[[], int] = time.time_ns) -> WeightFile:
    """Return a file's size, times and inode without reading its content. Raises OSError.

    ``clock``: returns the time of day in nanoseconds.
    """
    status = os.stat(path)
    return WeightFile(
        bytes=status.st_size,
        modified=status.st_mtime_ns,
        changed=status.st_ctime_ns,
        inode=status.st_ino,
        recent=clock() - status.st_ctime_ns < RECENT,
    )


def digest(path: Path, going_on: Callable[[], bool] = lambda: True) -> str | None:
    """Return the sha256 of a file's bytes as hex digits. Raises OSError.

    If ``going_on`` returns False along the way, stop reading and return None.
    """
    total, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            if not going_on():
                return None
            total.update(piece[:count])
    return total.hexdigest()


def compare_weights(
    before: Mapping[str, WeightFile],
    now: Mapping[str, WeightFile],
    paths: Mapping[str, Path],
    say: Callable[[str], None],
) -> tuple[dict[str, WeightFile], list[Change]]:
    """Compare weight files. Return the current ones with all digests known so far, and a list of changes.

    Files are only read if their length, times or inode have changed. If this may take a while, ``say`` is
    called with a message. ``paths``: the files' paths, by name. Raises OSError.
    """
    changes = [
        Change(name, _told(before.get(name)), _told(now.get(name))) for name in before.keys() ^ now.keys()
    ]
    files, unread = dict(now), []
    for name in before.keys() & now.keys():
        if now[name].same_file(before[name]) and not before[name].recent:
            files[name] = now[name].with_digest(before[name].sha256)
        elif before[name].sha256 is None:
            changes.append(Change(name, UNREAD, "another file"))
        else:
            unread.append(name)
    for name, digits in _read({name: paths[name] for name in unread}, now, say).items():
        files[name] = now[name].with_digest(digits)
        if digits != before[name].sha256:
            changes.append(Change(name, _told(before[name]), _told(files[name])))
    return files, sorted(changes, key=lambda change: change.name)


def _told(weights: WeightFile | None) -> str:
    if weights is None:
        return GONE
    digits = weights.sha256
    return (
        f"{weights.bytes} bytes" if digits is None else digits if digits == UNSTEADY else f"sha256 {digits}"
    )


def _read(
    paths: Mapping[str, Path], stats: Mapping[str, WeightFile], say: Callable[[str], None]
) -> dict[str, str | None]:
    """Return the digests of files, by name. ``stats``: the files' sizes."""
    total, stop, began = sum(stats[name].bytes for name in paths), threading.Event(), time.monotonic()
    if total > LARGE:
        say(
            f"reading {total / LARGE:.1f} GiB of weights to compare them with those at the start of the "
            "run, because their files were touched"
        )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            digests = dict(
                zip(
                    paths,
                    pool.map(partial(digest, going_on=lambda: not stop.is_set()), paths.values()),
                    strict=True,
                )
            )
        finally:
            stop.set()
    if total > LARGE:
        say(f"read the weights in {time.monotonic() - began:.0f} s")
    return digests


class DigestReader:
    """Computes an identity's missing digests in a low-priority thread.

    When all are known, ``put`` is called once with the complete identity. ``say`` is called with a message
    for each file that changed while it was being read.
    """

    def __init__(
        self,
        identity: Identity,
        paths: Mapping[str, Path],
        put: Callable[[Identity], None],
        say: Callable[[str], None],
    ) -> None:
        self._identity, self._paths, self._put, self._say = identity, paths, put, say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="digests of weights", daemon=True)

    def start(self) -> DigestReader:
        """Start the thread and return self."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop reading. Digests that are still missing will be computed when the run is resumed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until all files have been read."""
        self._thread.join(seconds)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has a priority per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        files = dict(self._identity.weights)
        for name, weights in files.items():
            if weights.sha256 is None:
                digits = self._digest(name, weights)
                if digits is None:
                    return
                files[name] = weights.with_digest(digits)
        if files != self._identity.weights:
            self._put(self._identity.model_copy(update={"weights": files}))

    def _digest(self, name: str, weights: WeightFile) -> str | None:
        """Return a file's digest, UNSTEADY if the file changed meanwhile, or None if the run ends first."""
        path = self._paths[name]
        try:
            digits = digest(path, lambda: not self._stop.is_set())
            steady = weight_file(path).same_file(weights)
        except OSError:
            digits, steady = UNSTEADY, False
        if digits is None:
            return None
        if not steady:
            self._say(f"{path} changed while the run was loading it: the run cannot be resumed, only forked")
        return digits if steady else UNSTEADY
