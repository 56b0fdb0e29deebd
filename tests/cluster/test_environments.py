"""Episodes on pools equal those of one process for any ranks, chunks and samplers. Ranks are threads, except
vLLM's."""

import json

import pytest
from safetensors.torch import load_file
from sources import TESTS

import rlflow
import rlflow.data.tasks

FILE = TESTS / "rewards" / "environments" / "again.py"
MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
APART = {"pools": "train=1@threads,rollout=1@threads"}


@pytest.fixture
def again(tmp_path):
    """Keywords of a small run that lets the model answer twice."""
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": MODEL,
        "data": str(tmp_path / "sums.jsonl"),
        "prompts": 6,
        "iterations": 2,
        "held_out": 16,
        "lr": 1e-3,
        "out": str(tmp_path / "runs"),
        "hp.max_tokens": 16,
        "hp.samples": 4,
        "env": f"{FILE}:Again",
        "env.turns": 2,
        "env.parallel": 1,
        "threads": 1,
        "save_every": 0,
    }


def lines(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def weights(result):
    return load_file(next(result.folder.glob("final/actor/model.safetensors")))


def samples(result):
    return [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_episodes_on_any_pools_equal_those_of_one_process(again):
    keywords = again | {"reward": ["task"]}
    here = rlflow.run("grpo", **keywords, name="here")
    for name, more in {"two": {"pools": "all=2@threads"}, "apart": APART | {"stream": 2}}.items():
        there = rlflow.run("grpo", **keywords, **more, name=name)
        assert [row["episode"] for row in samples(there)] == [row["episode"] for row in samples(here)], name
        for one, other in zip(lines(here), lines(there), strict=True):
            for metric in ("reward/mean", "env/turns", "response/length", "evaluation/sampled"):
                assert one.get(metric) == other.get(metric), (name, metric)
        for tensor, value in weights(here).items():
            assert (value - weights(there)[tensor]).abs().max() < 1e-4, (name, tensor)


@pytest.mark.slow
def test_episodes_of_the_null_backend_equal_those_of_one_process(again):
    keywords = {key: value for key, value in again.items() if key not in ("model", "lr")}
    keywords |= {"backend": "null", "held_out": 0, "hp.max_tokens": 96, "reward": ["task"]}
    here = rlflow.run("grpo", **keywords, name="here")
    assert all(1 < line["env/turns"] < 2 for line in lines(here)), "some episodes have two turns"
    apart = {"pools": "train=1@threads,rollout=2@threads", "stream": 2}
    for name, more in {
        "one": {"pools": "all=1@threads"},
        "four": {"pools": "all=4@threads"},
        "apart": apart,
    }.items():
        there = rlflow.run("grpo", **keywords, **more, name=name)
        assert [row["episode"] for row in samples(there)] == [row["episode"] for row in samples(here)], name
        for one, other in zip(lines(here), lines(there), strict=True):
            for metric in ("reward/mean", "env/turns", "response/length", "fates/trained"):
                assert one[metric] == other[metric], (name, metric)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("vllm_installed")
def test_vllm_and_the_trainer_agree_on_full_episodes(again, ray_address):
    result = rlflow.run(
        "grpo", **again | {"held_out": 0, "generator": "vllm"}, pools="all=1", ray_address=ray_address
    )
    iterations = [line for line in lines(result) if "policy/mismatch_max" in line]
    assert len(iterations) == 2
    assert all(line["policy/mismatch_max"] < 1e-4 for line in iterations)
    assert all(line["env/turns"] > 1 for line in iterations)


def test_an_environment_allows_sampling_ahead_of_training(again):
    result = rlflow.run("grpo", **again | {"iterations": 3, "held_out": 0, "staleness": 1}, **APART)
    assert sum("env/turns" in line for line in lines(result)) == 3
