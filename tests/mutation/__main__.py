"""Change the sources at random places and see whether quick tests notice.

    python tests/mutation --count 400 --seed 0
    python tests/mutation --count 40 --seed 3 --under rlflow/maths --json mutants.json
    python tests/mutation --again mutants.json

Each mutant is one small change of one function of rlflow/ or backends/: a comparison, an arithmetic or boolean operator, a condition, a
constant, a deleted statement, a returned None. It is applied in a copy of the tree and judged by tests that run in forks of one warm
process (server.py): the unmarked tests that mirror its module, then those of who imports it and of the tests beside (judges.py), then slow
ones of the files that are listed for it. killed, killed slow: a test failed, or did not end in time, that passes without it. survived: none
did. timeout: none had after --seconds, which counts as not noticed. A mutant that no test can kill, since nothing that anybody could see
differs, is listed in equivalents.toml with the reason, and is not run.

With --again those of an earlier run that nothing noticed are judged again, and its other verdicts stand: tests were added since, and the
sources are what they were.
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

from equivalents import equivalents, reason
from judges import batches
from mutants import Mutant, mutants
from tree import Tree

VERDICTS = ("killed", "killed slow", "survived", "timeout", "equivalent")


def drawn(root: Path, count: int, seed: int, under: str) -> list[tuple[Path, Mutant]]:
    """So many mutants of all that there are in a tree, all equally likely. A smaller count gives the first ones of a larger one."""
    paths = [path.relative_to(root) for folder in ("rlflow", "backends") for path in sorted((root / folder).rglob("*.py"))]
    every = [(path, mutant) for path in paths if str(path).startswith(under) for mutant in mutants((root / path).read_text())]
    random.Random(seed).shuffle(every)
    return every[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--under", default="", help="only in files whose path begins so")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all tests of one mutant")
    parser.add_argument("--json", type=Path, help="the file that gets every verdict")
    parser.add_argument("--again", type=Path, help="such a file: of its mutants those that were not noticed, again")
    chosen = parser.parse_args()
    known, began = equivalents(), time.time()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rlflow-mutation-") as folder, ThreadPoolExecutor(chosen.jobs) as turns:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(chosen.jobs):
            trees.put(Tree.copied(Path(folder) / str(number)))
        whole = Tree.copied(Path(folder) / "whole").folder  # no mutant is ever applied here, whoever edits the sources meanwhile
        mutated = drawn(whole, chosen.count, chosen.seed, chosen.under)
        if chosen.again:
            rows, mutated = again(whole, json.loads(chosen.again.read_text())["mutants"])

        def judged(number: int) -> dict[str, Any]:
            path, mutant = mutated[number]
            row = {"file": str(path), "line": mutant.line, "kind": mutant.kind, "before": mutant.before, "after": mutant.after}
            if why := reason(known, path, mutant, (whole / path).read_text()):
                return {**row, "verdict": "equivalent", "by": why, "seconds": 0.0}
            tree, since = trees.get(), time.monotonic()
            try:
                source = mutant.applied((whole / path).read_text())
                verdict, test = tree.verdict(path, source, batches(path, whole), chosen.seconds, int(began) + 2 * number)
            finally:
                trees.put(tree)
            return {**row, "verdict": verdict, "by": test, "seconds": round(time.monotonic() - since, 1)}

        for row in turns.map(judged, range(len(mutated))):
            rows.append(row)
            print(f"{row['verdict']:11} {row['seconds']:6.1f} s  {place(row)}", flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps({"seed": chosen.seed, "count": len(mutated), "mutants": rows}, indent=1) + "\n")
        while not trees.empty():
            trees.get().close()
    print(f"\n{table(rows)}\n\n{time.time() - began:.0f} s in all")


def again(root: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[Path, Mutant]]]:
    """The verdicts of an earlier run that stand, and the mutants of the others, each where the source has the same text nearest to where
    it was. One that the source has no more is left out."""
    stand = [row for row in rows if row["verdict"].startswith("killed")]
    mutated = []
    for row in (row for row in rows if row not in stand):
        path = Path(row["file"])
        alike = [mutant for mutant in mutants((root / path).read_text())
                 if (mutant.kind, mutant.before, mutant.after) == (row["kind"], row["before"], row["after"])]  # fmt: skip
        mutated += [(path, mutant) for mutant in sorted(alike, key=lambda mutant: abs(mutant.line - row["line"]))[:1]]
    return stand, mutated


def place(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['line']} {row['kind']}: {row['before'][:60]} → {row['after'][:60]}"


def table(rows: list[dict[str, Any]]) -> str:
    """Verdicts by kind, and of all; equivalents have no part in the share of killed ones."""
    lines = [f"| kind | {' | '.join(VERDICTS)} | noticed, of those run |", f"| --- |{' ---: |' * (len(VERDICTS) + 1)}"]
    for kind in [*sorted({row["kind"] for row in rows}), "all"]:
        found = Counter(row["verdict"] for row in rows if kind in (row["kind"], "all"))
        run = sum(found.values()) - found["equivalent"]
        share = f"{(found['killed'] + found['killed slow']) / run:.0%}" if run else "–"
        lines.append(f"| {kind} | {' | '.join(str(found[verdict]) for verdict in VERDICTS)} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
