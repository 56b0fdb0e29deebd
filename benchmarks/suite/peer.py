"""Interpreters of other systems: a system that names what it needs gets a virtual environment of its own,
made once.

A file of a system may define ``REQUIRES``, a tuple of requirements such as ("trl==1.16.0", "torch"). A
requirement without a version gets that of this interpreter, so that both compute with the same.
``WITHOUT_DEPENDENCIES``, of the same form, is installed after them and alone:
what these packages require is left out. Without ``REQUIRES`` this interpreter runs it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlflow.benchmarks.measured_process import CellFailed

LAST = 500  # letters of what pip said
# the variable that names a further package index, where PyPI has not this build of torch
INDEX = "RLFLOW_PEER_INDEX"


def cache_folder() -> Path:
    """The folder of the virtual environments."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlflow" / "peers"


def requirements(file: Path, variable: str = "REQUIRES") -> tuple[str, ...]:
    """The requirements that a file names under a variable, read without running it."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == variable for name in node.targets
        ):
            return tuple(pinned(each) for each in ast.literal_eval(node.value))
    return ()


def pinned(requirement: str) -> str:
    """The requirement with this interpreter's version, where it has none."""
    if any(letter in requirement for letter in "=<>~@"):
        return requirement
    try:
        return f"{requirement}=={version(requirement)}"
    except PackageNotFoundError:
        return requirement


def installations(file: Path) -> list[tuple[str, ...]]:
    """The words of each call of pip that a system needs; none where this interpreter runs it."""
    wanted, alone = requirements(file), requirements(file, "WITHOUT_DEPENDENCIES")
    return [wanted, ("--no-deps", *alone)] if wanted and alone else [wanted] if wanted else []


def environment_folder(file: Path) -> Path:
    """The folder of a system's virtual environment, which is whole where it has a file ``installed``."""
    words = [word for step in installations(file) for word in step]
    return cache_folder() / hashlib.sha256("\n".join([sys.version, *words]).encode()).hexdigest()[:12]


def interpreter(file: Path, say: Callable[[str], None]) -> str:
    """The interpreter that runs a system, made where it is not there yet. Raises CellFailed where it cannot
    be made."""
    steps = installations(file)
    if not steps:
        return sys.executable
    words = [word for step in steps for word in step]
    folder = environment_folder(file)
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.is_file():
        say(f"installing {' '.join(words)} in {folder}")
        venv.create(folder, with_pip=True, clear=True)
        extra = ["--extra-index-url", os.environ[INDEX]] if INDEX in os.environ else []
        for step in steps:
            done = subprocess.run(
                [python, "-m", "pip", "install", "--quiet", *extra, *step], capture_output=True, text=True
            )
            if done.returncode:
                raise CellFailed(
                    f"{' '.join(step)} cannot be installed: {done.stderr.strip()[-LAST:]}\nwhere torch is a "
                    f"build that PyPI has not, {INDEX} names an index that has it"
                )
        mark.write_text("\n".join(words))
    return str(python)
