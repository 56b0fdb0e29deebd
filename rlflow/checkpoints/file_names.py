"""Check names of files and folders in a checkpoint: no name may refer to a path outside of it."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_GROUP = re.compile(SEGMENT)
_FILE = re.compile(rf"{SEGMENT}(?:/{SEGMENT})?")
_STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")

EXPECTED = "letters, digits, '.', '_' and '-', not starting with '.' or '-', and at most one folder"


def is_group(name: str) -> bool:
    """Return whether a group of tensors may have this name."""
    return _GROUP.fullmatch(name) is not None


def is_file(name: str) -> bool:
    """Return whether a file may have this name: ``NAME`` or ``FOLDER/NAME``.

    All other names are refused, for example absolute paths and names with '..', encoded characters, NUL or
    other separators.
    """
    return _FILE.fullmatch(name) is not None and name.partition("/")[0] != MANIFEST


def step(iteration: int, revision: int = 1) -> str:
    """Return the folder name of an iteration's checkpoint.

    If the iteration is saved again, the new checkpoint gets a revision as suffix, so that no checkpoint is
    replaced.
    """
    return f"step-{iteration:08d}" + (f"-{revision}" if revision > 1 else "")


def of_step(name: str) -> tuple[int, int] | None:
    """Return (iteration, revision) from the folder name of a checkpoint; None for any other name.

    These tuples sort checkpoints by age.
    """
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None
