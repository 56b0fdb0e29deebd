"""Probes in every interpreter of a probed copy.

`rlflow_probe_N()` records that the current test reached probe N. Hits are bytes in a file that all processes
map, with a row for each test. Each interpreter maps the file when it starts. Forks, spawned processes and Ray
workers therefore record their hits too, even inside a sandbox.
"""

from __future__ import annotations

import builtins
import mmap
import os
from collections.abc import Callable
from pathlib import Path

HEAD = 8  # bytes before the rows, which contain the number of the current row
ROWS = 50_000  # most tests and shared fixtures in one run; the file is sparse


def install(path: str, probes: int) -> None:
    """Map the hits file, and define the probes as builtins, which need no import."""
    memory = mapped(path)
    for number in range(probes):
        setattr(builtins, f"rlflow_probe_{number}", _noting(memory, number, probes))


def mapped(path: str) -> mmap.mmap:
    """Map a file into memory."""
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
    """Create an empty hits file, or clear an existing one."""
    path.write_bytes(b"")
    os.truncate(path, HEAD + ROWS * probes)


def hits(path: Path, row: int, probes: int) -> list[int]:
    """Return the numbers of the probes that have a hit in a row."""
    with path.open("rb") as file:
        file.seek(HEAD + row * probes)
        return [number for number, hit in enumerate(file.read(probes)) if hit]
