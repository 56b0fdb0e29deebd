"""Two launches into one run folder: one works, and the other names the working process. A killed process
holds no lock."""

import json
import os

import pytest
from run_faults import killed_holder, race

import rlflow

pytestmark = pytest.mark.slow

ROUNDS = 10


@pytest.fixture
def folder(tmp_path):
    """A run of one iteration."""
    keywords = {
        "backend": "null",
        "prompts": 4,
        "threads": 1,
        "out": str(tmp_path),
        "name": "held",
        "hp.samples": 2,
    }
    return rlflow.run("grpo", iterations=1, **keywords).folder


def test_the_second_launch_exits_with_3_and_names_the_first(folder, tmp_path):
    for iterations in range(2, 2 + ROUNDS):
        found = race(folder, iterations, tmp_path)
        assert (found.first.code, found.second.code) == (3, 0), found
        assert f"another process uses the run directory '{folder}'" in found.first.err
        assert f"process {found.pids[1]} on {os.uname().nodename}" in found.first.err
        assert found.second.err == ""
    done = [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert done == list(range(1 + ROUNDS))  # each iteration appears once


def test_the_lock_of_a_killed_run_is_free_at_once(folder, tmp_path):
    for iterations in range(2, 5):
        assert killed_holder(folder, iterations, tmp_path).code == -9
        # the killed process had no time to write more
        assert json.loads((folder / "status.json").read_text())["state"] == "running"
        found = race(folder, iterations, tmp_path)
        assert (found.first.code, found.second.code) == (3, 0), found
        assert json.loads((folder / "status.json").read_text())["state"] == "done"
