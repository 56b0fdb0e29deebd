"""A reward that swaps the scores of rows: TRL trains with it (if TRL is installed), and `rlflow prove` reports
it."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

from rlflow.benchmarks import peers
from rlflow.benchmarks.peer import environment_folder

TRL = environment_folder(Path(next(iter(peers.__path__))) / "trl.py")


def silent(*words):
    command = [sys.executable, "benchmarks/silent.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_fault_gives_scores_to_wrong_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import silent_rewards as rewards

    rows = {
        "queries": ["1+1=2", "9+9=-118", "2+2=4", "3+3=7"],
        "prompts": ["1+1=", "9+9=", "2+2=", "3+3="],
        "labels": ["2", "18", "4", "6"],
    }
    assert rewards.reward_in_order(**rows) == [1.0, 0.0, 1.0, 0.0]
    assert rewards.reward_misplaced(**rows) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.long
def test_rlflow_reports_only_the_faulty_function():
    printed = silent("--only", "rlflow")
    wrong = [line for line in printed.splitlines() if line.startswith("falsified")]
    assert len(wrong) == 1
    assert "the scores are returned in the wrong order" in wrong[0]
    assert "exit codes: 2 with the fault, 0 without it" in printed


@pytest.mark.long
@pytest.mark.skipif(
    not (TRL / "installed").is_file(), reason="TRL's environment is not there; rlflow bench peers makes it"
)
def test_trl_shows_no_difference_with_the_fault():
    printed = silent("--only", "trl", "--iterations", "2")
    rows = [list(map(float, line.split()[1:])) for line in printed.splitlines() if re.match(r"\d", line)]
    assert len(rows) == 2
    assert all(len(row) == 10 and all(map(math.isfinite, row)) for row in rows)
    assert rows[0][4] == rows[0][5]  # the mean reward of the first iteration
    assert rows[0][2] > 0
    assert rows[0][3] > 0
