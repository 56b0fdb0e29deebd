"""docs/correctness.md lists the verdict of every recorded case. RLFLOW_WRITE_DOCS=1 writes the page again."""

import os
from collections import Counter
from pathlib import Path

from rlflow.author.load import load

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "correctness.md"
registry = load(FOLDER / "registry.py")
INTRODUCTION = """\
# Correctness

rlflow's arithmetic is compared with {all} recorded results of other projects. Each case has inputs, settings, and the
outputs and gradients that the other project's own code computed in the named version. `tests/oracles` has the cases,
and one test module per subject. Each case is one of

- **pass** ({pass}): the test compares the recorded values;
- **transformed** ({transformed}): the conventions differ. The test transforms inputs or outputs, as the last column
  says, and then compares;
- **not ours** ({not ours}): rlflow has nothing to compare with.

The first two kinds are {compared} cases. They compare rlflow's own stages, losses and averages in float64, or in
float32 if the other project did. Each case has its own tolerance, mostly 1e-6 relative. Padding is compared only if
both projects define it. Logged metrics of the other project are not compared. Cases of the source `derived` follow
from the mathematics and come from no project.

Two more tests cover every algorithm. `tests/algorithms/test_invariance.py` checks that the order of rows, padding,
micro-batches and repeated groups do not change results. `tests/algorithms/test_exact_gradient.py` compares expected
gradients with true gradients, by enumeration.

`tests/oracles/test_page.py` writes this page. In the last column, *peer* is the other project.
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
    lines += ["| case | function | source | verdict | difference |", "| --- | --- | --- | --- | --- |"]
    for name, case in registry.CASES.items():
        verdict, of = (
            verdicts[name],
            " ".join(dict.fromkeys(f"{case.peer} {case.version}".replace(" commit", "").split())),
        )
        lines.append(f"| `{name}` | {case.function} | {of} | {verdict.kind} | {verdict.why} |")
    return "\n".join(lines) + "\n"


def test_every_case_has_a_place():
    assert set(placed()) == set(registry.CASES)


def test_the_page_states_the_verdict_of_each_case():
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        PAGE.write_text(written())
    assert PAGE.read_text() == written()
