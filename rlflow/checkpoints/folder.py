"""A run's ``checkpoints`` folder.

It contains the checkpoints and the file ``latest``, which points to the newest complete one.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlflow.checkpoints import durable, file_names
from rlflow.errors import PlanError

FOLDER = "checkpoints"
POINTER = "latest"
SMALL = 4096  # maximum number of bytes that are read from a pointer or a lock
_POINTER = re.compile(rb"(step-[0-9-]{8,32}) ([0-9a-f]{64}) ([0-9a-f]{16})\n")


@dataclass(frozen=True)
class Pointer:
    """What the file ``latest`` says: a checkpoint's folder name and the sha256 of its manifest."""

    name: str
    digest: str

    def encode(self) -> bytes:
        """Encode the pointer as one line that ends with its own digest.

        With this digest, you can tell whether the pointer or the checkpoint is damaged.
        """
        text = f"{self.name} {self.digest}"
        return f"{text} {_short(text)}\n".encode()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_run(run_folder: Path) -> Path:
    """Return the path of a run's ``checkpoints`` folder. Raises PlanError if it is a symbolic link."""
    folder = run_folder / FOLDER
    if folder.is_symlink():
        raise PlanError.of(
            "checkpoint-link",
            f"'{folder}' is a symbolic link",
            found=f"a link to {os.readlink(folder)}",
            expected="a folder of the run",
            remedy="put the complete run on that disk with --out",
        )
    return folder


def steps(folder: Path) -> list[Path]:
    """Return the paths of a run's checkpoints, newest first, or [] if there's no ``folder``. Raises OSError."""
    try:
        entries = [name for name in os.listdir(folder) if file_names.of_step(name)]
    except FileNotFoundError:
        return []
    return [
        folder / name
        for name in sorted(entries, key=lambda name: file_names.of_step(name) or (0, 0), reverse=True)
    ]


def free_name(folder: Path, iteration: int) -> Path:
    """Return an unused path for the checkpoint after ``iteration``, with the next revision if needed."""
    revision = 1
    while os.path.lexists(folder / file_names.step(iteration, revision)):
        revision += 1
    return folder / file_names.step(iteration, revision)


def write_aside(folder: Path, pointer: Pointer, aside: str) -> Path:
    """Write the pointer to a temporary file named ``aside`` in ``folder``, and return its path.

    The caller then renames it to ``latest``. Raises OSError.
    """
    durable.write(folder / aside, [pointer.encode()])
    return folder / aside


def read_pointer(folder: Path) -> Pointer:
    """Read the pointer in ``folder``.

    Raises ValueError if it is missing or damaged, or if it doesn't name a checkpoint.
    """
    path = folder / POINTER
    try:
        data = durable.read(path, SMALL)
    except FileNotFoundError:
        raise ValueError("it is missing") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    match = _POINTER.fullmatch(data)
    if not match or not file_names.of_step(match[1].decode()):
        raise ValueError("it is damaged: not the name of a checkpoint and two digests")
    pointer = Pointer(match[1].decode(), match[2].decode())
    if pointer.encode() != data:
        raise ValueError("it is damaged: its own digest differs")
    return pointer
