"""The chain of plain Ray calls, in its own process as in a comparison."""

import sys

import pytest

from rlflow.benchmarks.cells import PEERS
from rlflow.benchmarks.measured_process import CellProcess


@pytest.mark.long
def test_actors_are_called_stage_by_stage_in_their_own_ray(tmp_path):
    cell = CellProcess(sys.executable, PEERS / "plain_ray.py", tmp_path / "log", 120)
    try:
        flags = {"workers": 2, "stages": 3, "calls": 2, "iterations": 2}
        assert cell.ask("prepare", cell={"flags": flags}, folder=str(tmp_path), seed=0) == {"iterations": 2}
        turn = cell.ask("iterate", count=5)
        assert [row["wall"] > 0 for row in turn["iterations"]] == [True, True]
        assert turn["ended"]
    finally:
        cell.close()
