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

rlflow's arithmetic is compared with {all} recorded cases. A case contains inputs, settings, outputs and gradients.
Another project's own code computed the outputs and gradients; the table names the project and its version. In {derived}
cases, whose source is `derived`, they follow from the mathematics instead. `tests/oracles` contains the cases and
their tests.

Each case has a verdict:

- **pass** ({pass}): the test compares rlflow's results with the recorded values.
- **transformed** ({transformed}): the two projects use different conventions, which the last column names. Unless the
  column says otherwise, the test applies the other project's convention to rlflow's inputs or results.
- **not ours** ({not ours}): rlflow has no function that the case could be compared with.

The tests of the {compared} cases with the verdict `pass` or `transformed` call rlflow's own stages, losses and averages.
They compute in float64, or in float32 if the other project did. Most tolerances are 1e-6 relative. Values at padding
are compared only if both projects define them. Metrics that the other project logs are not compared.

Two more test modules cover every algorithm. `tests/algorithms/test_invariance.py` checks that results do not depend on
the order of rows, padding, micro-batches or repeated groups. `tests/algorithms/test_exact_gradient.py` enumerates all
responses of a small problem and compares the expected gradient with the true gradient.

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
    derived = sum(case.peer == "derived" for case in registry.CASES.values())
    lines = [INTRODUCTION.format(all=len(registry.CASES), compared=compared(), derived=derived, **counts)]
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
