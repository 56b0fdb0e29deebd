"""The loop by itself, with workers that are in this process: what it does where these are lost, and when it looks at its folder."""

from dataclasses import replace

import pytest

from rlflow.author.load import load_flow
from rlflow.checkpoints.load import load_latest
from rlflow.errors import StageError
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.session import start_run
from rlflow.watch.reporter import Quiet


class Workers:
    """Pools that can no longer be started anew from a look on, counted from 1."""

    def __init__(self, lost_at):
        self.lost_at, self.looks = lost_at, 0

    def lost(self):
        self.looks += 1
        return "Ray's gcs_server (pid 7) has died" if self.looks >= self.lost_at else None

    def death(self, error):
        return None


def run(tmp_path, workers):
    values = {"backend": "null", "prompts": 4, "iterations": 5, "save_every": 0, "commit_every": 0, "out": str(tmp_path), "name": "run"}
    flow = load_flow("grpo")
    config, hp = resolve_config(flow, None, values)
    return start_run(replace(prepare(flow, hp, config, judge=None), workers=workers), Quiet())


def test_a_run_whose_pools_could_not_be_started_anew_ends_before_the_next_iteration_and_is_saved(tmp_path):
    with pytest.raises(StageError, match=r"(?s)gcs_server \(pid 7\) has died.*saved as step-0*2; go on with: rlflow resume"):
        run(tmp_path, Workers(lost_at=3))
    assert load_latest(tmp_path / "run").snapshot.iteration == 2


def test_workers_are_looked_at_before_every_iteration(tmp_path):
    workers = Workers(lost_at=100)
    assert run(tmp_path, workers).iterations == 5
    assert workers.looks == 5
