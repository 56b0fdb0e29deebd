"""Change the sources at random places and check whether tests notice.

    python benchmarks/mutation --count 60 --seed 0
    python benchmarks/mutation --count 40 --seed 3 --under rlflow/author --json mutants.json -- tests/author
    python benchmarks/mutation --again mutants.json
    python benchmarks/mutation --mutants mutants.json --coverage covered.json -- -m slow

A mutant is one small change to one function in rlflow/ or backends/: a comparison, an arithmetic or boolean
operator, a condition, a constant, a deleted statement, or a returned None.

First, the test suite runs once in a copy of the tree, with a probe at the line of each mutant. This shows
which tests reach the line, in any process. Words after `--` are passed to pytest; without them, pytest runs
its default tests. Then each mutant is applied in a copy of the tree. The tests that reach it, and other tests
of its package, run on it (rule.py), in forks of one process that has loaded the large packages (server.py).

A mutant is killed if a test fails twice with the mutant and passes without it. A test also fails if it takes
longer than five times its normal time plus a minute. A mutant that is not killed survives. Mutants without a
visible effect are listed in equivalents.toml with the reason, and are not run.

--again tests the surviving mutants of an earlier run again, and keeps its other verdicts. --mutants tests all
mutants of an earlier run, even of another commit: each is placed at the nearest line with the same text.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import probes
import rule
from equivalents import equivalents, reason
from mutants import Mutant, mutants
from tree import Tree

ROOT = Path(__file__).parents[2]
VERDICTS = ("killed", "survived", "equivalent")


def drawn(root: Path, count: int, seed: int, under: str) -> list[tuple[Path, Mutant]]:
    """Draw ``count`` mutants of a tree at random.

    With the same seed, a larger ``count`` only adds mutants at the end. ``under``: only mutate files whose
    path begins with this text.
    """
    paths = [
        path.relative_to(root)
        for folder in ("rlflow", "backends")
        for path in sorted((root / folder).rglob("*.py"))
    ]
    every = [
        (path, mutant)
        for path in paths
        if str(path).startswith(under)
        for mutant in mutants((root / path).read_text())
    ]
    random.Random(seed).shuffle(every)
    return every[:count]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of mutants")
    parser.add_argument("--under", default="", help="mutate only files whose path starts with this text")
    parser.add_argument(
        "--again", type=Path, help="a JSON file of an earlier run: test its surviving mutants again"
    )
    parser.add_argument("--mutants", type=Path, help="a JSON file of an earlier run: test all its mutants")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to test, with its environment in .venv"
    )
    parser.add_argument(
        "--coverage", type=Path, help="file of which tests reach which mutant; it is measured if missing"
    )
    parser.add_argument(
        "--seconds", type=float, default=rule.BUDGET, help="maximum seconds of tests for one mutant"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants tested in parallel")
    parser.add_argument("--json", type=Path, help="write every verdict to this file")
    parser.add_argument("words", nargs="*", help="arguments for pytest that select the tests")
    return parser.parse_args()


def main() -> None:
    chosen, began = options(), time.time()
    root = chosen.tree.resolve()
    rows, mutated = [], drawn(root, chosen.count, chosen.seed, chosen.under)
    if chosen.mutants:
        mutated = found(root, listed(chosen.mutants))
    if chosen.again:
        rows, mutated = again(root, listed(chosen.again))
    with tempfile.TemporaryDirectory(prefix="rlflow-m-") as folder:
        covered = coverage(chosen, root, Path(folder), mutated)
        for row in tested(chosen, root, Path(folder), mutated, covered):
            rows.append(row)
            print(f"{row['verdict']:10} {row['seconds']:6.1f} s  {place(row)}", flush=True)
            if chosen.json:
                chosen.json.write_text(
                    json.dumps({"seed": chosen.seed, "count": len(mutated), "mutants": rows}, indent=1) + "\n"
                )
    print(f"\n{table(rows)}\n\n{time.time() - began:.0f} s in total")


def coverage(
    chosen: argparse.Namespace, root: Path, folder: Path, mutated: list[tuple[Path, Mutant]]
) -> probes.Covered:
    """Return which tests reach each mutant. Measures this unless a file has the result for all mutants."""
    if chosen.coverage and chosen.coverage.exists():
        covered = probes.Covered.loaded(chosen.coverage)
        if all(probes.name(*each) in covered.covering for each in mutated):
            return covered
    covered = probes.measured(root, folder / "probed", mutated, chosen.words)
    if chosen.coverage:
        covered.saved(chosen.coverage)
    return covered


def tested(
    chosen: argparse.Namespace,
    root: Path,
    folder: Path,
    mutated: list[tuple[Path, Mutant]],
    covered: probes.Covered,
) -> Any:
    """Test the mutants, and yield a row for each, in the given order."""
    known, began = equivalents(), int(time.time())
    words = [word for word in chosen.words if not (root / word.split("::")[0]).exists()]
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(chosen.jobs):
        trees.put(Tree.copied(root, folder / str(number) / "t", words))
    sources = {path: (root / path).read_text() for path, _ in mutated}

    def verdict(number: int) -> dict[str, Any]:
        path, mutant = mutated[number]
        covering = covered.covering[probes.name(path, mutant)]
        row = {
            "file": str(path),
            "line": mutant.line,
            "kind": mutant.kind,
            "before": mutant.before,
            "after": mutant.after,
        }
        if why := reason(known, path, mutant, sources[path]):
            return {**row, "verdict": "equivalent", "by": why, "covering": len(covering), "seconds": 0.0}
        stages = rule.stages(path, covering, covered.seconds, chosen.seconds)
        tree, since = trees.get(), time.monotonic()
        try:
            by = tree.killer(path, mutant.applied(sources[path]), stages, covered.seconds, began + 2 * number)
        finally:
            trees.put(tree)
        seconds = round(time.monotonic() - since, 1)
        return {
            **row,
            "verdict": "killed" if by else "survived",
            "by": by or "",
            "covering": len(covering),
            "seconds": seconds,
        }

    try:
        with ThreadPoolExecutor(chosen.jobs) as turns:
            yield from turns.map(verdict, range(len(mutated)))
    finally:
        while not trees.empty():
            trees.get().close()


def listed(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an earlier run."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["mutants"]
    return rows


def again(root: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[Path, Mutant]]]:
    """Return (rows of an earlier run whose verdicts are kept, mutants to test again)."""
    stand = [row for row in rows if row["verdict"].startswith("killed")]
    return stand, found(root, [row for row in rows if row not in stand])


def found(root: Path, rows: list[dict[str, Any]]) -> list[tuple[Path, Mutant]]:
    """Return the mutants of an earlier run, each at the nearest line of the source with the same text.

    A mutant whose text no longer occurs in the source is printed and skipped.
    """
    mutated = []
    for row in rows:
        path = Path(row["file"])
        alike = [
            mutant
            for mutant in mutants((root / path).read_text())
            if (mutant.kind, mutant.before, mutant.after) == (row["kind"], row["before"], row["after"])
        ]
        mutated += [
            (path, mutant) for mutant in sorted(alike, key=lambda mutant: abs(mutant.line - row["line"]))[:1]
        ]
        if not alike:
            print(f"{'gone':10} {'':9} {place(row)}")
    return mutated


def place(row: dict[str, Any]) -> str:
    """Return a string that describes the mutant in a row."""
    return f"{row['file']}:{row['line']} {row['kind']}: {row['before'][:60]} → {row['after'][:60]}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with the number of each verdict, by kind of mutant and in total.

    The share of killed mutants is computed without equivalent mutants.
    """
    lines = [
        f"| kind | {' | '.join(VERDICTS)} | killed, of those run |",
        f"| --- |{' ---: |' * (len(VERDICTS) + 1)}",
    ]
    for kind in [*sorted({row["kind"] for row in rows}), "all"]:
        counts = Counter(row["verdict"] for row in rows if kind in (row["kind"], "all"))
        run = sum(counts.values()) - counts["equivalent"]
        share = f"{counts['killed'] / run:.0%}" if run else "–"
        lines.append(f"| {kind} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
