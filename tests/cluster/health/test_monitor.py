"""A worker that dies, is suspended or hangs is named and killed soon. A run without in-memory checkpoints
ends and resumes from its last save."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.health.monitor import Death, WatchedWorker
from rlflow.cluster.sharding.shard_map import WorkerId
from rlflow.errors import StageError
from rlflow.monitoring.reporter import Quiet
from rlflow.processes.process import Process
from rlflow.processes.watchdog import process_tag
from rlflow.runs import resume

HANGING = str(Path(__file__).parents[1] / "hanging.py")
HEARTBEAT = 6.0  # a busy machine delays a healthy worker
LINE = next(
    number
    for number, line in enumerate(Path(HANGING).read_text().splitlines(), 1)
    if '"hold": lambda' in line
)
SMALL = {
    "prompts": 6,
    "iterations": 3,
    "held_out": 0,
    "threads": 1,
    "save_every": 1,
    "pools": "all=2",
    "heartbeat": HEARTBEAT,
    "commit_every": 0,
}


def run(tmp_path, ray_address, name, **keywords):
    return rlflow.run(
        HANGING,
        out=str(tmp_path),
        name=name,
        **{**SMALL, "ray_address": ray_address, **keywords},
        **{"hp.count": str(tmp_path / "calls")},
    )


def failing(tmp_path, ray_address, **keywords):
    """Return the message of a run that fails."""
    with pytest.raises(StageError) as failure:
        run(tmp_path, ray_address, "failing", **keywords)
    return str(failure.value)


def has_ended(text):
    """Return True if no process that the text names runs; its parent may not have reaped it yet."""
    states = [process_tag.stat(int(pid)) for pid in re.findall(r"pid (\d+)", text)]
    return all(state is None or state.state in "ZX" for state in states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "place", "said"),
    [
        ("stop", "policy_loss", "is stopped"),  # the other rank waits for it in a collective
        ("hold", "judge", "is alive but not responding"),
    ],
)
def test_a_silent_worker_is_named_and_killed(tmp_path, ray_address, fault, place, said):
    backend = "local" if place == "policy_loss" else "null"
    text = failing(
        tmp_path, ray_address, backend=backend, **{"hp.fault": fault, "hp.place": place, "hp.call": 3}
    )
    assert re.search(
        rf"rank [01] of pool 'all' \(pid \d+ on .*, actor\) {said}.*without an answer for \d+ s", text
    )
    # the worker's stack; the stack of a suspended worker may come too late
    assert fault == "stop" or f"hanging.py:{LINE} in <lambda>" in text
    assert "failed in iteration" in text
    assert has_ended(text)


@pytest.mark.long
def test_a_spinning_stage_ends_at_its_own_deadline(tmp_path, ray_address):
    text = failing(
        tmp_path, ray_address, backend="null", **{"hp.fault": "spin", "hp.place": "judge", "hp.call": 2}
    )
    assert re.search(r"stage 'judge' .* no answer to 'stage' from rank [01] of pool 'all' after 15 s", text)
    assert "in spin" in text
    assert "stage of judge in iteration" in text


@pytest.mark.slow
def test_a_run_resumes_unchanged_after_the_death_of_a_worker(tmp_path, ray_address):
    """The run ends like a run in this process. A run on one rank is bit-equal to it."""
    one_rank = {"pools": "all=1", "hp.fault": "die", "hp.place": "policy_loss", "hp.call": 4}
    text = failing(tmp_path, ray_address, **one_rank)
    assert "has died" in text
    resumed = resume.resume(tmp_path / "failing", {}, Quiet())
    whole = run(tmp_path, None, "whole", pools="", heartbeat=0.0)
    assert resumed.iterations == whole.iterations == 3
    one, other = (load_file(result.folder / "final/actor/model.safetensors") for result in (resumed, whole))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert os.path.getsize(tmp_path / "calls") > 4


def test_a_death_is_reported_with_process_place_roles_and_work():
    process = Process.this()
    worker = WatchedWorker(
        WorkerId("all", 1), None, ProcessInfo(process, "0123456789abcdef"), "actor", (("sampling", 2.4),)
    )
    assert str(Death(worker, "has died", True)) == (
        f"rank 1 of pool 'all' (pid {os.getpid()} on {process.host}, node 01234567, actor) has died; at "
        "its last heartbeat it ran sampling for 2 s"
    )
    assert str(replace(worker, roles="", doing=())).endswith("node 01234567)")
    assert replace(worker, doing=()).last_activity() == "at its last heartbeat it ran nothing"
