"""Names of files and folders that may stand in a checkpoint: none of them can lead out of it."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_GROUP = re.compile(SEGMENT)
_FILE = re.compile(rf"{SEGMENT}(?:/{SEGMENT})?")
_STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")

EXPECTED = "letters, digits, '.', '_' and '-', the first no '.' or '-', and at most one folder"


def is_group(name: str) -> bool:
    """Whether a group of tensors may have this name."""
    return _GROUP.fullmatch(name) is not None


def is_file(name: str) -> bool:
    """``NAME`` or ``FOLDER/NAME``. Everything else (absolute, '..', encoded, NUL, other separators) is
    refused by being none of these."""
    return _FILE.fullmatch(name) is not None and name.partition("/")[0] != MANIFEST


def step(iteration: int, revision: int = 1) -> str:
    """The folder of an iteration. Saved again, it gets a suffix: nothing that exists is ever replaced."""
    return f"step-{iteration:08d}" + (f"-{revision}" if revision > 1 else "")


def of_step(name: str) -> tuple[int, int] | None:
    """(iteration, revision) of a checkpoint's folder, which sort by age; None for any other name."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None
