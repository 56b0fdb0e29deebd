"""Rows that are asked, chosen and joined end on pools as in one process, ahead of training too, and after a cut."""

import json
from pathlib import Path

import pytest

import rlflow
from rlflow.checkpoints.load import load_latest
from rlflow.runs import resume
from rlflow.watch.reporter import Quiet

FLOWS = Path(__file__).parents[1] / "execution" / "lineage.py"
SMALL = {"prompts": 6, "iterations": 3, "threads": 1, "backend": "null", "save_every": 0}
TIMES = ("seconds", "response/tokens_per_second")


def told(folder):
    """Metrics but times, and the account of each iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fates = [json.loads(line) for line in (folder / "fates.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines], fates


def run(name, folder, **keywords):
    return told(rlflow.run(f"{FLOWS}::{name}", out=str(folder), **SMALL | keywords).folder)


@pytest.mark.parametrize(("name", "pools"), [
    ("critique", "all=2"), ("correction", "all=2"), ("marked", "all=2"), ("raft", "all=2"), ("critique", "train=2,rollout=1"),
    *(pytest.param(name, pools, marks=pytest.mark.slow) for name in ("critique", "correction", "debate", "marked", "harder")
      for pools in ("all=1", "all=4", "train=2,rollout=2")),
])  # fmt: skip
def test_pools_end_where_one_process_ends(tmp_path, ray_address, name, pools):
    lines, fates = run(name, tmp_path / "there", pools=pools, ray_address=ray_address)
    expected, accounts = run(name, tmp_path / "here")
    assert fates == accounts
    for line, other in zip(lines, expected, strict=True):
        rounded = {name: pytest.approx(value, rel=1e-12) for name, value in other.items() if name.endswith("/loss")}  # sums over ranks
        assert line == other | rounded


AHEAD = {"pools": "train=1,rollout=1", "staleness": 1, "iterations": 4, "save_every": 2}


@pytest.mark.parametrize("name", ["critique", *(pytest.param(name, marks=pytest.mark.slow) for name in ("correction", "debate", "harder"))])
def test_a_run_ahead_of_training_goes_on_where_it_was_cut(tmp_path, ray_address, name):
    run(name, tmp_path / "runs", ray_address=ray_address, **AHEAD)
    (folder,) = (tmp_path / "runs").iterdir()
    lines, fates = told(folder)
    assert len(fates) == 4
    for newer in (folder / "checkpoints").glob("step-*4"):  # as if it had been killed after the checkpoint of iteration 2
        newer.rename(tmp_path / "gone")
    (folder / "checkpoints" / "latest").unlink(missing_ok=True)
    (folder / "final").rename(tmp_path / "final")
    assert any(file.startswith("queue/") for file in load_latest(folder).snapshot.files)
    resume.resume(folder, {}, Quiet())
    assert told(folder) == (lines, fates)
