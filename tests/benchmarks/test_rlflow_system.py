"""A run of rlflow as a cell: it reports the run's records, and after a kill it resumes from its checkpoint."""

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import rlflow
from rlflow.benchmarks import rlflow_system
from rlflow.benchmarks.measured_process import CellFailed, CellProcess
from rlflow.benchmarks.rlflow_system import System, checkpoints

NULL = {
    "backend": "null",
    "prompts": 4,
    "threads": 1,
    "hp.samples": 2,
    "hp.max_tokens": 6,
    "iterations": 5,
    "save_every": 2,
}
CELL = {"algorithm": "grpo", "flags": NULL}


def recorded(folder):
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def test_turns_give_the_same_iterations_as_an_uninterrupted_run(tmp_path):
    alone = recorded(rlflow.run("grpo", out=str(tmp_path), name="alone", seed=3, **NULL).folder)
    system = System()
    assert system.prepare(CELL, str(tmp_path), 3) == {"iterations": 5}
    turns = [system.iterate(2), system.iterate(2), system.iterate(2)]
    system.close()
    assert [[row["iteration"] for row in turn["iterations"]] for turn in turns] == [[0, 1], [2, 3], [4]]
    assert [turn["ended"] for turn in turns] == [False, False, True]
    assert recorded(tmp_path / "run") == alone
    rows = [row for turn in turns for row in turn["iterations"]]
    assert [row["metrics"]["reward/mean"] for row in rows] == [line["reward/mean"] for line in alone]
    assert [row["tokens"] for row in rows] == [round(line["response/length"] * 8) for line in alone]
    assert all(row["wall"] > 0 for row in rows)
    assert not any("bytes" in row for row in rows)  # one process sends no bytes
    assert system.observe()["closes"]


def test_a_checkpoint_after_unrecorded_iterations_is_removed(tmp_path):
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    assert checkpoints(tmp_path)
    assert checkpoints(tmp_path, recorded=3)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-00000002"]
    assert not checkpoints(tmp_path, recorded=0)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_an_error_of_the_run_is_raised_by_the_turn(tmp_path):
    (tmp_path / "judge.py").write_text("def judge(completion):\n    raise ValueError('no')\n")
    system = System()
    system.prepare(
        {
            "algorithm": "grpo",
            "flags": {**NULL, "max_missing": 0.5, "reward": [f"{tmp_path}/judge.py:judge"]},
        },
        str(tmp_path),
        0,
    )
    with pytest.raises(RuntimeError, match="missing"):
        system.iterate(2)


@pytest.mark.slow
def test_a_killed_cell_resumes_to_the_same_result(tmp_path):
    expected = recorded(rlflow.run("grpo", out=str(tmp_path), name="alone", seed=0, **NULL).folder)
    with closing(CellProcess(sys.executable, Path(rlflow_system.__file__), tmp_path / "log", 120)) as cell:
        cell.ask("prepare", cell=CELL, folder=str(tmp_path), seed=0)
        cell.ask("iterate", count=3)
        written(tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json")
        cell.process.kill()
        with pytest.raises(CellFailed, match="ended with code -9"):
            cell.ask("iterate", count=1)
    with closing(CellProcess(sys.executable, Path(rlflow_system.__file__), tmp_path / "log", 120)) as cell:
        cell.ask("prepare", cell=CELL, folder=str(tmp_path), seed=0)
        turn = cell.ask("iterate", count=9)
        assert turn["ended"]
        assert turn["iterations"][0]["iteration"] == 2
        assert cell.use().memory > 0
    assert recorded(tmp_path / "run") == expected


def written(path):
    """Wait for a file that another process writes."""
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"{path} was not written"
        time.sleep(0.02)
