"""A run's identity: the model files, data, code, packages and machine that its numbers depend on, besides its
settings and its graph. Each part has a name. `rlflow resume` reports by these names what has changed.

Here too: digests of weights, which a thread takes while the run begins.
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
SHOWN = 60  # letters of a value that are shown


class WeightFile(BaseModel):
    """A file of weights. While length, times and inode are the same nobody has written to it, so that it need
    not be read again."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: int
    modified: int  # nanoseconds since the epoch, of the last change of its content
    changed: int  # nanoseconds since the epoch, of the last change of its inode
    inode: int
    # whether it was changed so shortly before that a later change may have the same time
    recent: bool = False
    # of its bytes; None where it has not been read yet
    sha256: Annotated[str, Field(pattern=rf"^([0-9a-f]{{64}}|{UNSTEADY})$")] | None = None

    def same_file(self, other: WeightFile) -> bool:
        """Whether nobody wrote to it in between, as far as that can be told without reading."""
        return (self.bytes, self.modified, self.changed, self.inode) == (
            other.bytes,
            other.modified,
            other.changed,
            other.inode,
        )

    def with_digest(self, digits: str | None) -> WeightFile:
        """The file with the digest of its bytes."""
        return self.model_copy(update={"sha256": digits})


class Identity(BaseModel):
    """The inputs that the numbers of a run depend on, each part under a name of its own."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal["rlflow-identity"] = "rlflow-identity"
    version: Literal[1] = 1
    kept: dict[str, str] = Field(default_factory=dict)  # parts that must be the same when the run goes on
    # parts of which a change is reported, such as versions of packages
    told: dict[str, str] = Field(default_factory=dict)
    # files of weights, which are compared by their digests
    weights: dict[str, WeightFile] = Field(default_factory=dict)

    def encode(self) -> bytes:
        """The content of identity.json."""
        return f"{json.dumps(self.model_dump(), indent=1)}\n".encode()


@dataclass(frozen=True)
class Change:
    """A part that is another now. Prints as a line."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {shortened(self.before)} → {shortened(self.now)}")


def shortened(value: str) -> str:
    """A value for a line; of a digest its first letters."""
    kind, _, digits = value.partition(" ")
    if kind == "sha256":
        return f"sha256 {digits[:12]}"
    return value if len(value) <= SHOWN else value[: SHOWN - 1] + "…"


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Parts that changed, went or came."""
    names = list(dict.fromkeys((*before, *now)))
    return [
        Change(name, before.get(name, GONE), now.get(name, GONE))
        for name in names
        if before.get(name) != now.get(name)
    ]


def read(folder: Path) -> Identity | None:
    """The identity that a run left; None where it left none. Raises ValueError for one that is damaged or of
    another version."""
    try:
        return Identity.model_validate_json(durable.read(folder / FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise ValueError(f"{FILE} cannot be read: {reason}") from error


PIECE = 1 << 20  # bytes that are read at a time
RECENT = 2 * 10**9  # nanoseconds: within them a filesystem may give two changes one time
NICE = 10  # how far reading beside a run gives way to it
LARGE = 1 << 30  # bytes of which it is said that they are read
AT_ONCE = 4  # files that are read while a run waits for them


def weight_file(path: Path, clock: Callable[[], int] = time.time_ns) -> WeightFile:
    """The file as it lies there, unread. ``clock``: gives nanoseconds of the time of day. Raises OSError."""
    status = os.stat(path)
    return WeightFile(
        bytes=status.st_size,
        modified=status.st_mtime_ns,
        changed=status.st_ctime_ns,
        inode=status.st_ino,
        recent=clock() - status.st_ctime_ns < RECENT,
    )


def digest(path: Path, going_on: Callable[[], bool] = lambda: True) -> str | None:
    """The sha256 of a file's bytes; None where it is no longer wanted. Raises OSError."""
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
    """The weights as they are now, with the digests that are known, and what changed. Files that nobody
    touched are not read; others are, and where that may take long it is said. Raises OSError."""
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
    """Digests of files that are waited for."""
    total, stop, began = sum(stats[name].bytes for name in paths), threading.Event(), time.monotonic()
    if total > LARGE:
        say(
            f"reading {total / LARGE:.1f} GiB of weights, to compare them with those that the run began "
            "with: their files are others"
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
        say(f"read them in {time.monotonic() - began:.0f} s")
    return digests


class DigestReader:
    """Takes the digests that an identity still lacks, in a thread that gives way to all others, and hands on
    the identity that has them.

    ``put`` gets it, in that thread, once; ``say`` is told of files that changed since they were looked at.
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
        """Begin to read; this reader."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End it, read or not: what is not read by now is read when the run goes on."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> None:
        """Wait until all is read, at most so many seconds."""
        self._thread.join(seconds)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux
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
        """None where the run ends first."""
        path = self._paths[name]
        try:
            digits = digest(path, lambda: not self._stop.is_set())
            steady = weight_file(path).same_file(weights)
        except OSError:
            digits, steady = UNSTEADY, False
        if digits is None:
            return None
        if not steady:
            self._say(f"{path} changed while the run was loading it: it cannot be resumed, only forked")
        return digits if steady else UNSTEADY
