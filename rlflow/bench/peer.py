"""Interpreters of other systems: a system that names what it needs gets a virtual environment of its own, made once.

A file of a system may define ``REQUIRES``, a tuple of requirements such as ("trl==1.16.0", "torch"). A requirement without a version gets
that of this interpreter, so that both compute with the same. Without ``REQUIRES`` this interpreter runs it.
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

from rlflow.bench.process import CellFailed

LAST = 500  # letters of what pip said
INDEX = "RLFLOW_PEER_INDEX"  # the variable that names a further package index, where PyPI has not this build of torch


def cache_folder() -> Path:
    """The folder of the virtual environments."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlflow" / "peers"


def requirements(file: Path) -> tuple[str, ...]:
    """The requirements that a file names, read without running it."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "REQUIRES" for name in node.targets):
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


def interpreter(file: Path, say: Callable[[str], None]) -> str:
    """The interpreter that runs a system, made where it is not there yet. Raises CellFailed where it cannot be made."""
    wanted = requirements(file)
    if not wanted:
        return sys.executable
    folder = cache_folder() / hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.is_file():
        say(f"installing {' '.join(wanted)} in {folder}")
        venv.create(folder, with_pip=True, clear=True)
        extra = ["--extra-index-url", os.environ[INDEX]] if INDEX in os.environ else []
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *extra, *wanted], capture_output=True, text=True)
        if done.returncode:
            raise CellFailed(f"{' '.join(wanted)} cannot be installed: {done.stderr.strip()[-LAST:]}\nwhere torch is a build that PyPI "
                             f"has not, {INDEX} names an index that has it")
        mark.write_text("\n".join(wanted))
    return str(python)
