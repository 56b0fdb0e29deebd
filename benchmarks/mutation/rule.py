"""The rule by which the tests of a suite judge a mutant, the same for every suite.

First those that reach its line, from the cheapest to the dearest; then the others under the folder of tests
that mirrors its package, since what a test shares with others, or sees of another process, may bear on it
too. So many of them run as took BUDGET seconds in the run that measured what they reach: how busy the machine
is later decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUDGET = 300.0
STEPS = (2.0, 10.0, 50.0)  # seconds after which the tests so far run, before more are collected


def stages(
    path: Path, covering: Iterable[str], seconds: dict[str, float], budget: float = BUDGET
) -> list[list[str]]:
    """Tests in the order in which they judge a mutant of this file, in parts that run together."""
    first = sorted(dict.fromkeys(covering), key=seconds.__getitem__)
    beside = sorted(set(of_folder(path, seconds)) - set(first), key=seconds.__getitem__)
    found: list[list[str]] = []
    spent = 0.0
    for tests in (first, beside):
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
    """The tests under the folder that mirrors the package of a source, or the nearest one above it; of
    rlflow/author/batch.py tests/author/test_batch.py and what lies in tests/batch."""
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
