"""PPO as a job and as a flow: the same parameters in the end, bit for bit."""

import inspect

import ppo_by_hand
import pytest
import torch
from safetensors.torch import load_file

import rlflow

FLAGS = {
    "iterations": 2,
    "prompts": 16,
    "held_out": 0,
    "threads": 1,
    "hp.minibatch": 8,
    "hp.epochs": 2,
    "hp.samples": 2,
}


def test_the_example_stays_short():
    assert len(inspect.getsource(ppo_by_hand).splitlines()) < 140


@pytest.mark.long
def test_a_job_by_hand_equals_the_flow_bit_for_bit(ray_address, tmp_path):
    threads = torch.get_num_threads()
    try:
        run = rlflow.run("ppo", out=str(tmp_path), **FLAGS)
    finally:
        torch.set_num_threads(threads)
    learned = ppo_by_hand.learn(FLAGS, ray_address)
    for role, weights in zip(("actor", "critic"), learned, strict=True):
        kept = load_file(run.folder / "final" / role / "model.safetensors")
        same = {name: weights[name] for name in kept if name in weights}
        assert len(same) == len(weights) > 10
        assert all(torch.equal(kept[name], tensor) for name, tensor in same.items()), role
