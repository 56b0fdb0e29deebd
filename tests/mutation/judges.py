"""Which quick tests judge a module: those that mirror it by path, those that import it, and the other tests of its package; where there are
none, those of the modules that import it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("tests/benchmarks", "tests/mutation", "tests/test_packaging.py")  # judge commands and the installation, not modules


def module_of(path: Path) -> str:
    """The name under which a source, relative to the root, is imported: backends/null.py is rlflow.backends.null."""
    names = [*path.with_suffix("").parts] if path.parts[0] == "rlflow" else ["rlflow", *path.with_suffix("").parts]
    return ".".join(names).removesuffix(".__init__")


def mirrors(path: Path, root: Path = ROOT) -> list[str]:
    """Test files that have a source's name, or its folder's: tests/backends/test_fsdp.py for backends/fsdp/network.py."""
    inside = Path(*path.parts[1:]) if path.parts[0] == "rlflow" else path
    folder = root / "tests" / inside.parent
    places = [folder / f"test_{path.stem}.py", root / "tests" / f"test_{path.stem}.py", folder.with_name(f"test_{folder.name}.py")]
    return [str(place.relative_to(root)) for place in dict.fromkeys(places) if place.exists()]


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules and names that a file imports, each in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def judges(path: Path, root: Path = ROOT) -> list[str]:
    """Test files, relative to the root: the mirror of a source first, then who imports it, then the tests beside the mirror."""
    inside = Path(*path.parts[1:]) if path.parts[0] == "rlflow" else path
    package = root / "tests" / inside.parent
    name = path.parent.name if path.stem == "__init__" else path.stem
    mirrors = [package / f"test_{name}.py", root / "tests" / f"test_{name}.py"]
    while not package.exists():
        package = package.parent
    names = {module_of(path), module_of(path.parent)} - {"rlflow"}  # a package gives what its modules define
    importers = [test for test in _files(root, ("tests",), "test_*.py") if names & imported(test)]
    beside = sorted(package.glob("test_*.py")) if package != root / "tests" else []
    chosen = dict.fromkeys(str(test.relative_to(root)) for test in [*mirrors, *importers, *beside] if test.exists())
    found = [test for test in chosen if not test.startswith(HEAVY)]
    return found or sorted({test for user in _users(path, root) for test in judges(user, root)})


def _users(path: Path, root: Path) -> list[Path]:
    """Sources that import this one."""
    return [source.relative_to(root) for source in _files(root, ("rlflow", "backends"), "*.py") if module_of(path) in imported(source)]


@cache
def _files(root: Path, folders: tuple[str, ...], pattern: str) -> list[Path]:
    return [path for folder in folders for path in sorted((root / folder).rglob(pattern))]
