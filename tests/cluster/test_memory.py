"""Pools within a memory limit: parts of models leave each rank and return, and no bit changes."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow

SETTINGS = {
    "prompts": 6,
    "iterations": 2,
    "held_out": 0,
    "threads": 1,
    "save_every": 0,
    "batch_tokens": 1024,
    "verify_every": 1,
}
TIMES = ("seconds", "response/tokens_per_second")


@pytest.fixture
def both(tmp_path):
    """Run keywords on two ranks without and with a limit; check that only times and moves differ."""

    def ran(**keywords):
        results = [
            rlflow.run("ppo", out=str(tmp_path), **SETTINGS, **keywords, **limit)
            for limit in ({}, {"memory": "18MB"})
        ]
        free, limited = (
            {path: load_file(path) for path in sorted(result.folder.glob("final/*/model.safetensors"))}
            for result in results
        )
        assert len(free) == len(limited) == 2
        for one, other in zip(free.values(), limited.values(), strict=True):
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        before, after = (
            [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
            for result in results
        )
        assert [{k: v for k, v in line.items() if k not in TIMES} for line in before] == [
            {k: v for k, v in line.items() if k not in TIMES} for line in after
        ]
        moved = json.loads((results[1].folder / "weights.json").read_text())
        assert moved["all.residency/moves"] > 0
        assert moved["all.residency/bytes"] > 0
        return moved

    return ran


@pytest.mark.slow
def test_a_memory_limit_does_not_change_two_ranks(both):
    both(pools="all=2@threads")


@pytest.mark.long
def test_a_memory_limit_does_not_change_shards_and_plans(both, ray_address):
    moved = both(pools="all=2", ray_address=ray_address, **{"actor.trainer": "fsdp"})
    assert moved["actor.sync/inbound"] == moved["actor.sync/bound"] > 0
