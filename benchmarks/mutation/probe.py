"""Runs in every interpreter of a probed copy: a call of `rlflow_probe_N()` notes that the test which is
running has reached probe N.

Hits are bytes of a file that all processes map, a row for each test: forks, spawned processes and Ray workers
note theirs alike, even behind walls, since the file is mapped when the interpreter starts."""

from __future__ import annotations

import builtins
import mmap
import os
from collections.abc import Callable
from pathlib import Path

HEAD = 8  # bytes before the rows: the number of the row that hits go to
ROWS = 50_000  # tests and shared fixtures of one run; the file is sparse


def install(path: str, probes: int) -> None:
    """Maps the file and makes the calls, under names that no import can lack."""
    memory = mapped(path)
    for number in range(probes):
        setattr(builtins, f"rlflow_probe_{number}", _noting(memory, number, probes))


def mapped(path: str) -> mmap.mmap:
    opened = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)


def _noting(memory: mmap.mmap, number: int, probes: int) -> Callable[[], None]:
    def note() -> None:
        memory[HEAD + int.from_bytes(memory[:HEAD], "little") * probes + number] = 1

    return note


def made(path: Path, probes: int) -> None:
    """A file without any hits, and where it is already the same one, emptied."""
    path.write_bytes(b"")
    os.truncate(path, HEAD + ROWS * probes)


def hits(path: Path, row: int, probes: int) -> list[int]:
    """The probes that were reached while hits went to this row."""
    with path.open("rb") as file:
        file.seek(HEAD + row * probes)
        return [number for number, hit in enumerate(file.read(probes)) if hit]
