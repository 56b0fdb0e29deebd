"""A role that follows another on two pools of processes gets the weights that it gets on pools of threads."""

import pytest
import torch
from sources import TESTS

import rlflow
from rlflow.checkpoints.reading import load_latest

FLOW = str(TESTS / "runs" / "flows" / "moving.py")
PLACES = {"actor.pool": "one", "anchor.pool": "two"}
SMALL = {
    "prompts": 4,
    "iterations": 2,
    "held_out": 0,
    "threads": 1,
    "lr": 1e-2,
    "save_every": 1,
    "prove": "off",
}


@pytest.mark.long
def test_processes_follow_like_threads(tmp_path, ray_address):
    found = []
    for name, keywords in (
        ("threads", {"pools": "one=2@threads,two=1@threads"}),
        ("processes", {"pools": "one=2,two=1", "ray_address": ray_address}),
    ):
        run = rlflow.run(FLOW, out=str(tmp_path), name=name, quiet=True, **SMALL, **PLACES, **keywords)
        found.append(load_latest(run.folder).snapshot.tensors)
    one, other = found
    assert one.keys() == other.keys() >= {"actor.parameters", "anchor.parameters"}
    for group, tensors in one.items():
        assert all(torch.equal(tensor, other[group][name]) for name, tensor in tensors.items()), group
    assert any(
        not torch.equal(tensor, one["actor.parameters"][name])
        for name, tensor in one["anchor.parameters"].items()
    )
