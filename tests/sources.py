"""Where the repository's folders are, and its Python files, each read and parsed once in the process that
runs tests."""

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
TASKS = ROOT / "rlflow" / "data" / "tasks"  # the packaged ones, with their models
#: folder → package, where they differ
INSTALLED_AS = {
    "backends": "rlflow.backends",
    "algorithms": "rlflow.algorithms",
    "benchmarks/suite": "rlflow.benchmarks",
}
PACKAGE = ("rlflow", "backends", "algorithms", "benchmarks/suite")  # the folders of which the package is made


@dataclass(frozen=True, eq=False)
class Source:
    """One file."""

    path: Path  # from the root of the repository
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        name = self.path.with_suffix("").as_posix()
        for folder, package in INSTALLED_AS.items():
            if name.startswith(f"{folder}/"):
                name = package + name.removeprefix(folder)
        return name.replace("/", ".").removesuffix(".__init__")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, as ``ast.walk`` gives them."""
        return list(ast.walk(self.tree))


@cache
def sources(*folders: str) -> list[Source]:
    """The files below each of these folders of the repository, in the order of their paths."""
    with uncollected():
        return [
            source(path.relative_to(ROOT))
            for folder in folders
            for path in sorted((ROOT / folder).rglob("*.py"))
        ]


@cache
def source(path: Path) -> Source:
    """The file at a path from the root of the repository."""
    text = (ROOT / path).read_text()
    return Source(path, text, ast.parse(text))


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for meanwhile: a tree has thousands of objects and no garbage, and looking takes
    longer than parsing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
