"""Find the files of a snapshot that an earlier checkpoint already has, so that they can be hard linked.

A file with several links exists only once on disk, so damage to it reaches every checkpoint that links to it.
The writer therefore never links a new checkpoint to the one before it, but to the one before that. Two
neighbouring checkpoints share no file, and if one is damaged, the other is still intact.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.checkpoints.manifest import FileEntry


@dataclass(frozen=True)
class SavedFiles:
    """The files of a checkpoint that this process has written."""

    folder: Path
    entries: Mapping[str, FileEntry]  # name of each file → length and digest


NO_FILES = SavedFiles(Path(), {})


def unchanged(files: Mapping[str, bytes], saved: SavedFiles) -> SavedFiles:
    """Return those of ``files`` that the checkpoint ``saved`` also has, byte for byte.

    The bytes on disk are compared, so a damaged file is never linked again. Files that can't be read are
    left out.
    """
    same = {name: saved.entries[name] for name, data in files.items() if _has(saved, name, data)}
    return SavedFiles(saved.folder, same)


def _has(saved: SavedFiles, name: str, data: bytes) -> bool:
    entry = saved.entries.get(name)
    if entry is None or entry.bytes != len(data):
        return False
    try:
        with open(durable.open_plain(saved.folder / name), "rb", buffering=0) as file:
            view = memoryview(data)
            pieces = (view[start : start + durable.CHUNK] for start in range(0, len(data), durable.CHUNK))
            return os.fstat(file.fileno()).st_size == len(data) and all(
                file.read(len(piece)) == piece for piece in pieces
            )
    except OSError:
        return False
