"""The repository's folders and its Python files. Each file is read and parsed once in the test process."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
TASKS = ROOT / "rlflow" / "data" / "tasks"  # the packaged algorithms, with their models
# : folder → package, if they differ
INSTALLED_AS = {
    "backends": "rlflow.backends",
    "algorithms": "rlflow.algorithms",
    "benchmarks/suite": "rlflow.benchmarks",
    "examples/recipes": "rlflow.recipes",
}
PACKAGE = (
    "rlflow",
    "backends",
    "algorithms",
    "benchmarks/suite",
    "examples/recipes",
)  # the folders of the package


@dataclass(frozen=True, eq=False)
class Source:
    """One file."""

    path: Path  # relative to the root of the repository
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Return the name of the module in this file."""
        name = self.path.with_suffix("").as_posix()
        for folder, package in INSTALLED_AS.items():
            if name.startswith(f"{folder}/"):
                name = package + name.removeprefix(folder)
        return name.replace("/", ".").removesuffix(".__init__")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return all nodes of the tree, as ``ast.walk`` gives them."""
        return list(ast.walk(self.tree))


@cache
def sources(*folders: str) -> list[Source]:
    """Return the files below each of these folders of the repository, ordered by path."""
    with uncollected():
        return [
            source(path.relative_to(ROOT))
            for folder in folders
            for path in sorted((ROOT / folder).rglob("*.py"))
        ]


@cache
def source(path: Path) -> Source:
    """Return the file at a path relative to the root of the repository."""
    text = (ROOT / path).read_text()
    return Source(path, text, ast.parse(text))


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off garbage collection: a tree has thousands of objects and no garbage, and the search takes
    longer than parsing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
