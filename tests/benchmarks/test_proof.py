"""Faults to test proofs with: each is a change of a file that still parses, and most of a sample are found."""

import ast
import re
import subprocess
import sys

import pytest
from sources import ROOT

COMMAND = [sys.executable, "benchmarks/proof.py", "--algorithm", "grpo", "--count"]


def test_every_fault_is_one_change_of_a_file_that_parses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from proof_faults import faults

    source = (ROOT / "algorithms" / "grpo.py").read_text()
    changed = list(faults(source))
    assert {"merge-deleted", "detached", "times-0", "negated", "rolled", "swapped"} <= {
        fault.kind for fault in changed
    }
    assert all(ast.dump(ast.parse(fault.text)) != ast.dump(ast.parse(source)) for fault in changed)


@pytest.mark.long
def test_harmful_faults_are_found():
    printed = subprocess.run([*COMMAND, "8"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    should, found = map(int, re.search(r"(\d+) harmful: (\d+) found", printed).groups())
    assert should >= 3
    assert found >= 0.9 * should, printed


@pytest.mark.long
def test_a_proof_on_pools_places_synthetic_scores_with_their_rows():
    words = [*COMMAND[:3], "dapo", "--shipped", "--backend", "null"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^dapo +null +\d+ proved, 0 falsified, 1 unproved", printed)
    assert "the backend of 'actor' has no weights" in printed
