"""Interpreters of other systems.

A system with requirements gets its own virtual environment, which is created once. A system's file may define
``REQUIRES``, a tuple of requirements such as ("trl==1.16.0", "torch"). If a requirement has no version, the
version in this interpreter is installed, so that both compute with the same package. ``WITHOUT_DEPENDENCIES``
has the same form. Its packages are installed afterwards, without their dependencies. A system without
``REQUIRES`` runs in this interpreter.
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

LAST = 500  # maximum number of characters of pip's output in an error message
# environment variable that names another package index, for a build of torch that PyPI does not have
INDEX = "RLFLOW_PEER_INDEX"


def cache_folder() -> Path:
    """Return the folder that contains the virtual environments."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlflow" / "peers"


def requirements(file: Path, variable: str = "REQUIRES") -> tuple[str, ...]:
    """Return the requirements that a file assigns to ``variable``, without running the file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == variable for name in node.targets
        ):
            return tuple(pinned(each) for each in ast.literal_eval(node.value))
    return ()


def pinned(requirement: str) -> str:
    """Return a requirement with a version. If it has none, it gets the version in this interpreter."""
    if any(letter in requirement for letter in "=<>~@"):
        return requirement
    try:
        return f"{requirement}=={version(requirement)}"
    except PackageNotFoundError:
        return requirement


def installations(file: Path) -> list[tuple[str, ...]]:
    """Return the arguments of each pip call that a system needs; empty if this interpreter can run the
    system.
    """
    wanted, alone = requirements(file), requirements(file, "WITHOUT_DEPENDENCIES")
    return [wanted, ("--no-deps", *alone)] if wanted and alone else [wanted] if wanted else []


def environment_folder(file: Path) -> Path:
    """Return the folder of a system's virtual environment.

    The file ``installed`` in it marks a complete environment.
    """
    words = [word for step in installations(file) for word in step]
    return cache_folder() / hashlib.sha256("\n".join([sys.version, *words]).encode()).hexdigest()[:12]


def interpreter(file: Path, say: Callable[[str], None]) -> str:
    """Return the interpreter for a system. If the system's virtual environment is missing, creates it.

    ``say``: prints a line of progress. Raises CellFailed if pip fails.
    """
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
                    f"{' '.join(step)} cannot be installed: {done.stderr.strip()[-LAST:]}\nif PyPI does not have "
                    f"this build of torch, set {INDEX} to a package index that has it"
                )
        mark.write_text("\n".join(words))
    return str(python)
