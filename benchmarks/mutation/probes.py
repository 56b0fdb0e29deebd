"""Measure which tests reach the line of each mutant.

The tests run once, in a copy of the tree that has a probe at each mutant.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import probe
from mutants import Mutant, span, starts
from tree import Tree

# a value that is falsy, even in an interpreter without probes
CALL = "getattr(__import__('builtins'), 'rlflow_probe_{}', bool)()"


@dataclass(frozen=True)
class Covered:
    """The result of a probed run.

    ``seconds``: the seconds of each test. ``covering``: the tests that reach each mutant, by the mutant's
    name.
    """

    seconds: dict[str, float]
    covering: dict[str, list[str]]

    def saved(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=0) + "\n")

    @classmethod
    def loaded(cls, path: Path) -> Covered:
        return cls(**json.loads(path.read_text()))


def name(path: Path, mutant: Mutant) -> str:
    """Return the name of a mutant in a coverage file."""
    return f"{path}:{mutant.line}: {mutant.kind}: {mutant.before} → {mutant.after}"


def measured(root: Path, folder: Path, mutated: list[tuple[Path, Mutant]], words: list[str]) -> Covered:
    """Measure which tests reach each mutant: run pytest in a probed copy of the tree at ``root``.

    ``folder``: where the copy is created. ``words``: pytest's arguments.
    """
    notes, tree = folder / "notes", Tree.copied(root, folder / "t")
    notes.mkdir()
    probe.made(notes / "hits", len(mutated))
    _installed(tree, notes / "hits", len(mutated))
    for path in {path for path, _ in mutated}:
        here = {number: mutant for number, (each, mutant) in enumerate(mutated) if each == path}
        (tree.folder / path).write_text(probed((root / path).read_text(), here))
    command = [
        str(tree.python),
        "-m",
        "pytest",
        "-p",
        "mutation_noting",
        "-p",
        "no:cacheprovider",
        "-q",
        f"--basetemp={folder / 'p'}",
    ]
    ran = subprocess.run(
        [*command, *words],
        cwd=tree.folder,
        env={**os.environ, "RLFLOW_MUTATION_NOTES": str(notes)},
        check=False,
        stdout=sys.stderr,
    )
    if ran.returncode not in (0, 1):
        sys.exit(f"the tests did not run: pytest exited with code {ran.returncode}")
    return read(notes, mutated)


def read(notes: Path, mutated: list[tuple[Path, Mutant]]) -> Covered:
    """Read the hits and the log of tests from the folder ``notes``. This also works while the tests run."""
    tests = [json.loads(line) for line in (notes / "tests.jsonl").read_text().splitlines()]
    covering: dict[str, list[str]] = {name(*each): [] for each in mutated}
    for test in tests:
        reached = {number for row in test["rows"] for number in probe.hits(notes / "hits", row, len(mutated))}
        for number in sorted(reached):
            covering[name(*mutated[number])].append(test["test"])
    return Covered({test["test"]: test["seconds"] for test in tests}, covering)


def probed(source: str, here: dict[int, Mutant]) -> str:
    """Return the source with a probe at each mutant: before its statement, or around its expression.

    ``here``: the mutants by probe number. Lines keep their line numbers.
    """
    whole, placed = source.encode(), []
    for number, mutant in here.items():
        if mutant.kind in ("deleted", "returned"):
            placed += [(mutant.begin, 1, f"{CALL.format(number)}; ")]
        elif _parses(_with(whole, _around(mutant.begin, mutant.end, number))):
            placed += _around(mutant.begin, mutant.end, number)
        else:
            placed += _around(*_matched(source, mutant), number)
    return _with(whole, placed)


def _around(begin: int, end: int, number: int) -> list[tuple[int, int, str]]:
    """Return the strings to insert around an expression, as (position, rank, string). At one position, a
    lower rank comes first: closing strings, then probes of statements, then probes of expressions, longer
    expressions before shorter ones.
    """
    return [(begin, 1_000_000_000 - end, f"({CALL.format(number)} or ("), (end, 0, "))")]


def _matched(source: str, mutant: Mutant) -> tuple[int, int]:
    """Return the byte range of a match statement's subject, for a mutant in one of the statement's patterns.

    A pattern cannot contain a call, so the probe is placed around the subject. If match statements are
    nested, the innermost one counts.
    """
    lines = starts(source)
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Match) and mutant.end <= span(node, lines)[1]
    ]
    return max(subject for node in around if (subject := span(node.subject, lines))[1] <= mutant.begin)


def _with(whole: bytes, placed: list[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for where, _, text in sorted(placed):
        parts += [whole[at:where], text.encode()]
        at = where
    return b"".join([*parts, whole[at:]]).decode()


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _installed(tree: Tree, hits: Path, probes: int) -> None:
    """Let every interpreter in the copy's environment map the hits file when it starts."""
    here = Path(__file__).parent
    for module in ("probe", "noting"):
        shutil.copy2(here / f"{module}.py", tree.packages / f"mutation_{module}.py")
    (tree.packages / "mutation_probe.pth").write_text(
        f"import mutation_probe; mutation_probe.install({str(hits)!r}, {probes})\n"
    )
