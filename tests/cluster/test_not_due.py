"""A flow whose calls are due in different iterations: runs in one process, on pools and resumed are equal."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow.author.load import load_flow
from rlflow.execution.offload_manager import OffloadManager
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume

FLOW = load_flow(str(Path(__file__).parent / "now_and_then.py"))
ITERATIONS, CUT = 8, 4  # a cycle has 6 iterations
SMALL = {"prompts": 4, "held_out": 0, "threads": 1, "prove": "off", "lr": 1e-3, "batch_tokens": 1024}
TIMES = ("seconds", "response/tokens_per_second")

pytestmark = pytest.mark.slow


def run(folder, name, **keywords):
    return rlflow.run(
        FLOW, out=str(folder), name=name, **{"iterations": ITERATIONS} | SMALL | keywords
    ).folder


def content(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    weights = {path.parent.name: load_file(path) for path in folder.glob("final/*/model.safetensors")}
    return metrics, weights, (folder / "fates.jsonl").read_text()


def assert_bit_equal(one, other):
    assert one[0] == other[0]
    assert one[2] == other[2]
    assert one[1].keys() == other[1].keys() == {"actor", "critic"}
    for role, tensors in one[1].items():
        assert all(torch.equal(tensor, other[1][role][name]) for name, tensor in tensors.items()), role


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return content(run(tmp_path_factory.mktemp("straight"), "straight"))


def test_metrics_are_only_recorded_of_calls_that_are_due(straight):
    metrics, _, _ = straight
    learned = [line["iteration"] for line in metrics if "critic.update/steps" in line]
    again = [line["iteration"] for line in metrics if "actor.update#2/steps" in line]
    assert (learned, again) == ([0, 2, 4, 6], [0, 3, 6])


def test_eager_iterations_end_with_the_same_weights(straight):
    roles = rlflow.roles(FLOW, **SMALL, iterations=ITERATIONS)
    try:
        for _ in range(ITERATIONS):
            FLOW(roles.take(), **roles)
        for role, saved in straight[1].items():
            own = dict(roles.prepared.engine.models[role].trainer.weights())
            assert len(own.keys() & saved.keys()) > 10
            assert all(torch.equal(own[name], saved[name]) for name in own.keys() & saved.keys()), role
    finally:
        roles.close()


def test_pools_of_threads_end_with_the_same_weights(straight, tmp_path):
    assert_bit_equal(straight, content(run(tmp_path, "pools", pools="train=1@threads,rollout=1@threads")))


def test_two_ranks_agree_up_to_rounding(straight, tmp_path):
    _, weights, _ = content(run(tmp_path, "two", pools="all=2@threads"))
    for role, tensors in weights.items():
        apart = sum(float((one - straight[1][role][name]).square().sum()) for name, one in tensors.items())
        assert apart / sum(float(one.square().sum()) for one in tensors.values()) < 1e-8


def test_a_memory_limit_holds_in_each_iteration(straight, tmp_path, monkeypatch):
    held, there, settle = set(), set(), OffloadManager.settle

    def noted(manager, needs):
        settle(manager, needs)
        own = manager.offload_plan
        there.add(frozenset(manager.in_memory))
        held.add(sum(own.fixed.values()) + sum(own.sizes[part] for part in manager.in_memory) - own.limit)

    monkeypatch.setattr(OffloadManager, "settle", noted)
    assert_bit_equal(straight, content(run(tmp_path, "tight", memory="16MB")))
    assert max(held) <= 0
    assert len(there) > 4  # parts move


def test_a_run_resumed_in_the_middle_of_a_cycle_is_bit_equal(straight, tmp_path):
    folder = run(tmp_path, "cut", iterations=CUT)
    resume.resume(folder, {"iterations": ITERATIONS}, Quiet())
    assert_bit_equal(straight, content(folder))
