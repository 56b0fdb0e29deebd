"""Secrets are masked in the output of a cell's process."""

import contextlib
import sys

import pytest

from rlflow.benchmarks.measured_process import CellFailed, CellProcess

SYSTEM = """
import os, sys
print("begins with", os.environ["OF_MINE_TOKEN"], file=sys.stderr)

class System:
    def prepare(self, fails):
        if fails:
            raise ValueError(os.environ["OF_MINE_TOKEN"])
        os._exit(3)
"""


def test_a_cells_secrets_are_masked_in_failure_and_log(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_MINE_TOKEN", "SEKRET-by-its-variable")
    (tmp_path / "system.py").write_text(SYSTEM)
    process = CellProcess(sys.executable, tmp_path / "system.py", tmp_path / "log.txt", 60.0)
    with contextlib.closing(process):
        with pytest.raises(CellFailed, match=r"^ValueError: \*\*\*$"):
            process.ask("prepare", fails=True)
        with pytest.raises(CellFailed, match=r"(?s)ended with code 3.*begins with \*\*\*"):
            process.ask("prepare", fails=False)
    text = (tmp_path / "log.txt").read_text()
    assert text.startswith("begins with ***\n")
    assert "SEKRET" not in text
