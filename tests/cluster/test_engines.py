"""Trainers and generators of several backends on pools, checked after each sync."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import fork

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("vllm_installed")]

SMALL = {"prompts": 8, "iterations": 2, "held_out": 0, "threads": 1, "save_every": 0, "verify_every": 1}


def lines(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def final(result, role="actor"):
    return load_file(result.folder / "final" / role / "model.safetensors")


def distance(one, other):
    """Return the relative distance of two sets of weights."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in one.values())) ** 0.5


def check_truth(rows):
    """Check that trainer and sampler agree on the samples and on fixed tokens after each sync."""
    assert len(rows) == SMALL["iterations"]
    for row in rows:
        assert row["policy/mismatch_max"] < 1e-4
        assert row["canary/actor_max"] < 1e-4


def test_sharded_weights_reach_vllm_without_redundant_bytes(tmp_path, ray_address):
    """Two ZeRO ranks with a full sampler each equal four FSDP ranks of which two share one vLLM, and one
    process."""
    result = rlflow.run(
        "grpo",
        out=str(tmp_path),
        pools="all=2",
        ray_address=ray_address,
        **SMALL,
        **{"actor.trainer": "deepspeed"},
    )
    rows = lines(result)
    check_truth(rows)
    model = sum(tensor.nbytes for tensor in final(result).values())
    moved = json.loads((result.folder / "weights.json").read_text())
    assert 0 < moved["actor.sync/inbound"] == moved["actor.sync/bound"] < 0.6 * model
    assert rows[0]["actor.update/steps"] >= 1
    sharded = fork(
        result.folder,
        {
            "iterations": 3,
            "pools": "all=4",
            "actor.trainer": "fsdp",
            "actor.generator": "vllm",
            "actor.generator.tensor_parallel": 2,
            "out": str(tmp_path),
        },
        Quiet(),
    )
    assert 0 < distance(final(sharded), final(result)) < 0.1
    assert lines(sharded)[-1]["canary/actor_max"] < 1e-4
    assert lines(sharded)[-1]["policy/mismatch_max"] < 1e-4
    moved = json.loads((sharded.folder / "weights.json").read_text())
    # some ranks store nothing of one side
    assert 0.4 * model < moved["actor.sync/inbound"] == moved["actor.sync/bound"] < 0.6 * model
    moved_on = fork(
        result.folder, {"iterations": 3, "actor.trainer": "local", "pools": "", "out": str(tmp_path)}, Quiet()
    )
    assert 0 < distance(final(moved_on), final(result)) < 0.1


def test_zero_trainers_and_a_tensor_parallel_sampler_on_a_pool_of_its_own(tmp_path, ray_address):
    """The trainers score during sampling, within a memory limit, so they take turns in memory. The sampler
    cannot leave memory on a CPU. Weights move from pool to pool, one half to each rank."""
    result = rlflow.run(
        "ppo",
        out=str(tmp_path),
        pools="train=2,rollout=2",
        ray_address=ray_address,
        stream=3,
        memory="20MB",
        weights="alltoall",
        **SMALL,
        **{
            "actor.trainer": "deepspeed",
            "critic.trainer": "deepspeed",
            "actor.generator": "vllm",
            "actor.generator.tensor_parallel": 2,
            "actor.kv_cache_memory_bytes": 12_000_000,
        },
    )
    check_truth(lines(result))
    model = sum(tensor.nbytes for tensor in final(result).values())
    moved = json.loads((result.folder / "weights.json").read_text())
    assert moved["actor.sync/transport"] == "store"
    assert 0.4 * model < moved["actor.sync/inbound"] == moved["actor.sync/bound"] < 0.6 * model
    assert all(torch.isfinite(tensor).all() for tensor in final(result, "critic").values())
    assert moved["train.residency/moves"] > 0
    assert not any(name.startswith("rollout.") for name in moved)
