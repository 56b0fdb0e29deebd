"""Every recorded case has its place, and docs/correctness.md says which. RLFLOW_WRITE_DOCS=1 writes the page
anew."""

import os
from collections import Counter
from pathlib import Path

from rlflow.author.load import load

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "correctness.md"
registry = load(FOLDER / "registry.py")
INTRODUCTION = """\
# Correctness

These are {all} recorded results of other projects: inputs, settings, and the outputs and gradients that their own code gave at the
version named. {compared} of them are compared with rlflow's arithmetic. `tests/oracles` holds the cases, and one module of tests per
subject. Each case is one of

- **pass** ({pass}): compared as it was recorded;
- **transformed** ({transformed}): the conventions differ. The test changes inputs or outputs as the last column says, then compares;
- **not ours** ({not ours}): rlflow has nothing to compare.

What is compared are rlflow's own stages, losses and averages, in float64 unless the peer's are in float32, with the tolerance of the
case (1e-6 relative in most). Padding is compared only where both define it. What a peer logs beside is not compared. `derived` cases
are properties that follow from the mathematics, and of no project.

Beyond the cases, `tests/algorithms/test_invariance.py` holds every algorithm to properties (order of rows, padding, micro-batches,
repeated groups), and `tests/algorithms/test_exact_gradient.py` compares expected gradients with true ones, by enumeration.

`tests/oracles/test_page.py` writes this page.
"""


def placed():
    for path in sorted(FOLDER.glob("test_*.py")):
        if path != Path(__file__):
            load(path)
    return registry.VERDICTS


def compared():
    return sum(verdict.kind != "not ours" for verdict in placed().values())


def written():
    verdicts = placed()
    counts = Counter(verdict.kind for verdict in verdicts.values())
    lines = [INTRODUCTION.format(all=len(registry.CASES), compared=compared(), **counts)]
    lines += ["| case | function | of | verdict | why |", "| --- | --- | --- | --- | --- |"]
    for name, case in registry.CASES.items():
        verdict, of = (
            verdicts[name],
            " ".join(dict.fromkeys(f"{case.peer} {case.version}".replace(" commit", "").split())),
        )
        lines.append(f"| `{name}` | {case.function} | {of} | {verdict.kind} | {verdict.why} |")
    return "\n".join(lines) + "\n"


def test_every_case_has_its_place():
    assert set(placed()) == set(registry.CASES)


def test_the_page_says_where_each_case_stands():
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        PAGE.write_text(written())
    assert PAGE.read_text() == written()
