"""Read checkpoints. Every byte is checked against the manifest's digests before any tensor is returned."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import safetensors
from safetensors.torch import load as tensors_of
from torch import Tensor

from rlflow.checkpoints import durable, file_names, folder
from rlflow.checkpoints.manifest import LARGEST, FileEntry, Manifest, decode
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.errors import PlanError, Problem

Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded, and the problems found along the way."""

    snapshot: Snapshot  # its content
    path: Path  # its folder
    rejected: list[tuple[Path, str]]  # newer checkpoints that are damaged, with the reasons
    #: files in its folder that are not part of the checkpoint, such as files of desktop programs; they are
    #: not read
    ignored: list[str] = field(default_factory=list)


class Damaged(Exception):
    """Raised if a checkpoint is damaged. ``problems`` lists everything that's wrong with it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def load_latest(run_folder: Path, wanted: Wanted = lambda group: True) -> Loaded:
    """Load the run's checkpoint that ``latest`` names or, if it is damaged, the newest intact one.

    ``wanted``: returns whether to load a group of tensors, given its name. All files are verified, even those
    that aren't loaded. Raises PlanError, with the reason for each checkpoint, if none is intact.
    """
    rejected: list[tuple[Path, str]] = []
    for path, digest in _candidates(folder.of_run(run_folder), rejected):
        try:
            return Loaded(read(path, wanted, digest), path, rejected, unlisted(path))
        except Damaged as damage:
            rejected.append((path, str(damage)))
    raise _none_good(run_folder, rejected)


def _candidates(where: Path, rejected: list[tuple[Path, str]]) -> Iterator[tuple[Path, str | None]]:
    """Yield the checkpoints to try, each with the expected digest of its manifest, or None if unknown.

    The first is the one that ``latest`` names, with its digest. The others follow without a digest, newest
    first. Problems are added to ``rejected``.
    """
    try:
        every = folder.steps(where)
    except OSError as error:
        rejected.append((where, f"it cannot be read: {error.strerror}"))
        return
    try:
        pointer = folder.read_pointer(where)
    except ValueError as error:
        if every:
            rejected.append((where / folder.POINTER, str(error)))
        pointer = None
    first = [where / pointer.name] if pointer else []
    yield from ((path, pointer.digest if pointer else None) for path in first)
    yield from ((path, None) for path in every if path not in first)


def _none_good(run_folder: Path, rejected: list[tuple[Path, str]]) -> PlanError:
    if not rejected:
        return PlanError.of(
            "no-checkpoint",
            f"the run '{run_folder}' has no checkpoint",
            found="no folder checkpoints/step-…",
            expected="a saved checkpoint",
            remedy="start the run again",
        )
    first = Problem(
        "no-checkpoint",
        f"no checkpoint of the run '{run_folder}' can be used",
        found=f"only damaged ones, {len(rejected)} in all",
        expected="an intact checkpoint",
        remedy="start the run again, or restore a checkpoint from a copy",
    )
    return PlanError(
        first, *(Problem("checkpoint-damaged", f"'{path}': {reason}") for path, reason in rejected)
    )


def verify(path: Path) -> list[str]:
    """Return a line for each fault in a checkpoint, or [] if it is intact."""
    try:
        read(path, lambda group: False)
    except Damaged as damage:
        return damage.problems
    return []


def read(path: Path, wanted: Wanted = lambda group: True, digest: str | None = None) -> Snapshot:
    """Read and verify a checkpoint. Only groups of tensors for which ``wanted`` returns True are kept.

    ``digest``: the expected sha256 of the manifest, or None if unknown. Raises Damaged if any byte is wrong.
    """
    manifest = _manifest(path, digest)
    problems = [f"{name} is missing" for name in _compared(path, manifest)[0]]
    owners = manifest.shards()
    tensors: dict[str, dict[str, Tensor]] = {group: {} for group in manifest.groups if wanted(group)}
    files: dict[str, bytes] = {}
    for name, entry in manifest.files.items():
        group, members = owners.get(name, (None, []))
        try:
            data = _content(path / name, entry, keep=group is None or group in tensors)
            if group is None:
                files[name] = data
            elif group in tensors:
                tensors[group] |= _shard(data, members)
        except FileNotFoundError:
            continue  # reported above as missing
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            problems.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise Damaged(problems)
    try:
        return Snapshot(manifest.iteration, tensors, manifest.state, files)
    except PlanError as error:
        raise Damaged([str(error)]) from error


def _manifest(path: Path, digest: str | None) -> Manifest:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise Damaged(["it is a link or a file, not a folder"])
        data = durable.read(path / file_names.MANIFEST, LARGEST)
        if len(data) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        if digest is not None and hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("it does not have the digest that 'latest' gives")
        manifest = decode(data)
    except FileNotFoundError as error:
        raise Damaged([f"{Path(str(error.filename)).name} is missing"]) from error
    except (OSError, ValueError) as error:
        raise Damaged([f"{file_names.MANIFEST}: {getattr(error, 'strerror', None) or error}"]) from error
    step = file_names.of_step(path.name)
    if step and step[0] != manifest.iteration:
        raise Damaged([f"{file_names.MANIFEST}: it belongs to iteration {manifest.iteration}"])
    return manifest


def unlisted(path: Path) -> list[str]:
    """Return the files in a checkpoint's folder that aren't listed in its manifest.

    Raises Damaged if the manifest can't be read.
    """
    return _compared(path, _manifest(path, None))[1]


def _compared(path: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return two lists: listed files that are missing or not regular files, and files that aren't listed."""
    try:
        present = set(_listing(path))
    except OSError as error:
        raise Damaged([f"it cannot be read: {error.strerror}"]) from error
    expected = (
        manifest.files.keys()
        | {file_names.MANIFEST}
        | {name.partition("/")[0] + "/" for name in manifest.files if "/" in name}
    )
    return sorted(expected - present), sorted(present - expected)


def _listing(path: Path, prefix: str = "") -> Iterator[str]:
    with os.scandir(path) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            plain = entry.is_file(follow_symlinks=False)
            yield prefix + entry.name + ("" if plain else "/" if is_folder else " (a link or not a file)")
            if is_folder and not prefix:  # manifests only list files in one level of folders
                yield from _listing(path / entry.name, entry.name + "/")


def _content(path: Path, entry: FileEntry, *, keep: bool) -> bytes:
    """Check a file's size and digest. Return its bytes, or b"" unless ``keep`` is true.

    The file is read only once, so the returned bytes are the ones that were checked. Raises ValueError and
    OSError.
    """
    if path.parent.is_symlink():
        raise ValueError("its folder is a link")
    with open(durable.open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            raise ValueError(f"found {size} bytes, expected {entry.bytes}")
        data = file.read(entry.bytes) if keep else b""
        digest = hashlib.sha256(data) if keep else _digest(file)
    if digest.hexdigest() != entry.sha256:
        raise ValueError("its digest is not the one in the manifest")
    return data


def _digest(file: BinaryIO) -> hashlib._Hash:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(durable.CHUNK))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
    return digest


def _shard(data: bytes, members: list[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in the manifest's order.

    Raises ValueError if their names aren't ``members``.
    """
    tensors = tensors_of(data)
    if sorted(tensors) != sorted(members):
        raise ValueError("its tensors are not those in the manifest")
    return {name: tensors[name] for name in members}
