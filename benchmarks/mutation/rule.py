"""Select and order the tests for a mutant, by one rule for all mutants.

Tests that reach the mutant's line come first, the fastest first. Then come the other tests in the folder that
mirrors the package of the mutant's file, because shared fixtures or other processes may also depend on the
line. The selected tests took at most BUDGET seconds in the probed run. The current load of the machine
therefore does not change the selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUDGET = 300.0
STEPS = (2.0, 10.0, 50.0)  # after this many seconds of tests, a new part of the selection begins


def stages(
    path: Path, covering: Iterable[str], seconds: dict[str, float], budget: float = BUDGET
) -> list[list[str]]:
    """Return the tests for a mutant in the file ``path``, in stages that run one after another.

    The tests of a stage run together. ``covering``: tests that reach the mutant. ``seconds``: the seconds of
    each test.
    """
    first = sorted(dict.fromkeys(covering), key=seconds.__getitem__)
    others = sorted(set(of_folder(path, seconds)) - set(first), key=seconds.__getitem__)
    found: list[list[str]] = []
    spent = 0.0
    for tests in (first, others):
        part: list[str] = []
        for test in tests:
            if spent + seconds[test] > budget:
                break
            if part and any(spent <= step < spent + seconds[test] for step in STEPS):
                found.append(part)
                part = []
            part.append(test)
            spent += seconds[test]
        found += [part] if part else []
    return found


def of_folder(path: Path, tests: Iterable[str]) -> list[str]:
    """Return the tests in the folder that mirrors the package of the source ``path``.

    If this folder has no tests, the nearest parent folder with tests is used. For a module directly in
    rlflow/, such as rlflow/plan.py, these are tests/test_plan.py and the tests in tests/plan/.
    """
    inside = Path(*path.parts[1:]) if path.parts[0] == "rlflow" else path
    if len(inside.parts) == 1:
        return [
            test
            for test in tests
            if test.startswith((f"tests/test_{inside.stem}.py::", f"tests/{inside.stem}/"))
        ]
    for folder in list(inside.parents)[:-1]:
        if found := [test for test in tests if test.startswith(f"tests/{folder}/")]:
            return found
    return []
