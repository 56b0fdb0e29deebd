"""Runs on pools end where runs in one process end."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow

SMALL = {"prompts": 6, "iterations": 2, "held_out": 16, "threads": 1, "save_every": 0}
TIMES = ("seconds", "response/tokens_per_second")


def run(flow, folder, **keywords):
    result = rlflow.run(flow, out=str(folder), **SMALL | keywords)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    weights = {path.parent.name: load_file(path) for path in result.folder.glob("final/*/model.safetensors")}
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines], weights


def apart(one, other):
    """The relative distance of two sets of weights."""
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in one.values())) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("pools", ["all=1", "train=1,rollout=1"])
def test_one_rank_is_bit_equal_to_one_process(tmp_path, ray_address, pools):
    here, weights = run("ppo", tmp_path / "here")
    there, others = run("ppo", tmp_path / "there", pools=pools, ray_address=ray_address)
    assert there == here
    assert weights.keys() == others.keys() == {"actor", "critic"}
    for role, tensors in weights.items():
        assert all(torch.equal(tensor, others[role][name]) for name, tensor in tensors.items()), role


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("float64", 1e-7)])
def test_two_ranks_take_the_same_steps(tmp_path, ray_address, dtype, limit):
    here, weights = run("grpo", tmp_path / "here", dtype=dtype, iterations=5, held_out=0, **{"hp.minibatch": 20})
    there, others = run("grpo", tmp_path / "there", dtype=dtype, iterations=5, held_out=0, pools="all=2", ray_address=ray_address,
                        **{"hp.minibatch": 20})
    assert [line["actor.update/steps"] for line in there] == [line["actor.update/steps"] for line in here]
    assert 0 < apart(weights["actor"], others["actor"]) <= limit
