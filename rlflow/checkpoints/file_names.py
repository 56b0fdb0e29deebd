"""Check the names of files and folders in a checkpoint. No name may point outside the checkpoint's folder."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_GROUP = re.compile(SEGMENT)
_FILE = re.compile(rf"{SEGMENT}(?:/{SEGMENT})?")
_STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")

EXPECTED = "letters, digits, '.', '_' and '-', not starting with '.' or '-', and at most one folder"


def is_group(name: str) -> bool:
    """Return whether ``name`` can be the name of a group of tensors."""
    return _GROUP.fullmatch(name) is not None


def is_file(name: str) -> bool:
    """Return whether ``name`` can be the name of a file: ``NAME`` or ``FOLDER/NAME``.

    ``manifest.json`` is not allowed, nor are absolute paths or names with '..', encoded characters, NUL or
    other separators.
    """
    return _FILE.fullmatch(name) is not None and name.partition("/")[0] != MANIFEST


def step(iteration: int, revision: int = 1) -> str:
    """Return the folder name of the checkpoint after ``iteration``: ``step-N`` or ``step-N-REVISION``.

    If a run saves the same iteration again, the new checkpoint gets a higher revision and the old one is
    kept.
    """
    return f"step-{iteration:08d}" + (f"-{revision}" if revision > 1 else "")


def of_step(name: str) -> tuple[int, int] | None:
    """Parse a checkpoint's folder name into (iteration, revision), or return None for any other name.

    These tuples sort in the order in which the checkpoints were saved.
    """
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None
