"""Names of files and folders that are allowed in a checkpoint. None of them can refer to a path outside of
it."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_GROUP = re.compile(SEGMENT)
_FILE = re.compile(rf"{SEGMENT}(?:/{SEGMENT})?")
_STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")

EXPECTED = "letters, digits, '.', '_' and '-', not starting with '.' or '-', and at most one folder"


def is_group(name: str) -> bool:
    """Whether a name is allowed for a group of tensors."""
    return _GROUP.fullmatch(name) is not None


def is_file(name: str) -> bool:
    """Whether a name is ``NAME`` or ``FOLDER/NAME``. Everything else is refused: absolute paths, '..',
    encoded characters, NUL, other separators."""
    return _FILE.fullmatch(name) is not None and name.partition("/")[0] != MANIFEST


def step(iteration: int, revision: int = 1) -> str:
    """The folder name of an iteration's checkpoint. A second save of the iteration gets a suffix, so that
    nothing is ever replaced."""
    return f"step-{iteration:08d}" + (f"-{revision}" if revision > 1 else "")


def of_step(name: str) -> tuple[int, int] | None:
    """(iteration, revision) from the name of a checkpoint's folder, which sort by age; None for any other
    name."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None
