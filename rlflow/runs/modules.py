"""What a Python file imports: the files of its own folder or package, which a run depends on as on the file itself, and other packages.

Read from the text, without importing anything: a module whose name is made up while the file runs is not found.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Imports:
    """The files and modules that a file imports."""

    files: set[Path] = field(default_factory=set)  # in its own folder
    outside: set[str] = field(default_factory=set)  # top-level modules that lie elsewhere and are not Python's own


def imports(file: Path, module: str = "") -> Imports:
    """The imports of a file and of everything that it imports from its own folder; of a ``module`` of a package, from that package."""
    closure, waiting = Imports(), [file]
    root, own = root_of(file, module), module.partition(".")[0]
    known = {file}
    while waiting:
        path = waiting.pop()
        for name, level in _named(path):
            top = name.partition(".")[0]
            ours = level or (top == own if own else top != "rlflow")  # whose version is known
            inside = list(_inside(name, _base(path, root, level))) if ours else []
            if not inside and not level:
                closure.outside.add(name.partition(".")[0])
            new = set(inside) - known
            known |= new
            closure.files |= new
            waiting += new
    closure.outside -= set(sys.stdlib_module_names)
    return closure


def root_of(file: Path, module: str = "") -> Path:
    """The folder that is importable for a file: its own, or where its package begins."""
    return file.parents[module.count(".") + (file.name == "__init__.py") if module else 0]


def _base(path: Path, root: Path, level: int) -> Path:
    """The folder in which a name is looked for: dots before it go up from the file's own package."""
    return path.parents[level - 1] if level else root


def _named(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, dots before it) of each import of a file, also in its functions; of ``from a import b`` both a and a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            yield from ((start + alias.name, node.level) for alias in node.names)


def _inside(name: str, folder: Path) -> Iterator[Path]:
    """The files of a dotted name below a folder: its packages' ``__init__`` and the module. The last part may be no module."""
    for part in name.split("."):
        if (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder /= part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


def meaning(file: Path) -> str:
    """A digest of what a Python file says, whatever its comments and its layout. Raises OSError."""
    data = file.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # such a file is taken as it is
        data = ast.unparse(ast.parse(data)).encode(errors="backslashreplace")
    return hashlib.sha256(data).hexdigest()
