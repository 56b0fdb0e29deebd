"""Runs on pools end like runs in one process. Ranks are threads, except in the run that shows the same for
processes."""

import json
from pathlib import Path

import pytest
import torch
from keyed import keyed
from safetensors.torch import load_file

import rlflow
from rlflow.author.load import load
from rlflow.cluster import cluster_engine
from rlflow.cluster.sharding.steps import RankSteps
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.evaluate import shown
from rlflow.runs.evaluating import evaluate_run

flows = load(Path(__file__).parent / "flows.py")
SMALL = {"prompts": 6, "iterations": 2, "held_out": 16, "threads": 1, "save_every": 0}
TIMES = ("seconds", "response/tokens_per_second")


def run(flow, folder, **keywords):
    result = rlflow.run(flow, out=str(folder), **SMALL | keywords)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    weights = {path.parent.name: load_file(path) for path in result.folder.glob("final/*/model.safetensors")}
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines], weights


def distance(one, other):
    """Return the relative distance of two sets of weights."""
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in one.values())) ** 0.5


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """A function from a name and keywords to the metrics and weights of a PPO run with an evaluation, and its
    folder."""
    ground = tmp_path_factory.mktemp("ppo")
    sums = [{"prompt": f"{n} + 12 =", "answer": str(n + 12)} for n in range(20, 29)]
    (ground / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))

    def run_once(name, **keywords):
        found = run("ppo", ground, name=name, eval=[f"sums={ground}/sums.jsonl"], eval_samples=4, **keywords)
        return *found, ground / name

    return run_once


def answers(folder):
    return (folder / "evaluations/after-000002.jsonl").read_text()


def assert_bit_equal(one, other):
    """Check that metrics, answers and weights of two runs are equal to the last bit."""
    assert one[0] == other[0]
    assert answers(one[2]) == answers(other[2])
    assert one[1].keys() == other[1].keys() == {"actor", "critic"}
    for role, tensors in one[1].items():
        assert all(torch.equal(tensor, other[1][role][name]) for name, tensor in tensors.items()), role


@pytest.mark.slow
def test_one_rank_of_each_pool_is_bit_equal_to_one_process(ppo, tmp_path):
    """For one shared pool, test_recovery.py makes the comparison, with the death of a worker in between.
    Evaluations and answers are equal too, also from the checkpoint on other pools."""
    there = ppo("there", pools="train=1@threads,rollout=1@threads")
    assert_bit_equal(there, ppo("here"))
    lines, weights, folder = there
    again = evaluate_run(folder, {"pools": "all=2@threads"}, tmp_path / "again", Quiet())
    assert (again.folder / "answers.jsonl").read_text() == answers(folder)
    assert keyed(shown(again.accuracy)).items() <= lines[-1].items()
    assert_bytes_are_counted(folder, sum(tensor.nbytes for tensor in weights["actor"].values()))


def assert_bytes_are_counted(folder, model):
    """Check the bytes between ranks, each counted once. ``model``: the bytes of the actor's weights."""
    sizes = [json.loads(line) for line in (folder / "traffic.jsonl").read_text().splitlines()]
    kinds = ("columns", "weights", "commits")
    assert [tuple(line) for line in sizes] == [
        ("iteration", *(f"{prefix}{kind}" for kind in kinds))
        for prefix in ("evaluation/", "", "", "evaluation/")
    ]
    # once, to the one rank that samples, if it gets new weights
    assert model <= sizes[2]["weights"] < 1.2 * model
    assert sizes[2]["columns"] > 0
    # of two roles, with their moments once these exist
    assert sum(line["commits"] for line in sizes[1:3]) > 2 * model


@pytest.mark.slow
def test_ray_processes_end_like_threads(ppo, ray_address):
    """Equal bit for bit, with two ranks that train together and one that samples. Results of other tests with
    threads therefore hold for processes."""
    there = ppo("processes", pools="train=2,rollout=1", ray_address=ray_address)
    assert_bit_equal(there, ppo("threads", pools="train=2@threads,rollout=1@threads"))
    assert_bytes_are_counted(there[2], sum(tensor.nbytes for tensor in there[1]["actor"].values()))


STEPS = {"iterations": 3, "held_out": 0, "dtype": "float64", "hp.minibatch": 20}
LIMIT = 1e-7  # the remaining difference in float64 is rounding


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run in one process."""
    return run("grpo", tmp_path_factory.mktemp("alone"), **STEPS)


def steps(lines):
    return [line["actor.update/steps"] for line in lines]


@pytest.mark.slow
def test_several_ranks_take_the_same_steps(tmp_path, single):
    """With three ranks, minibatches of 20 rows do not divide evenly."""
    here, weights = single
    there, others = run("grpo", tmp_path, pools="all=3@threads", **STEPS)
    assert steps(there) == steps(here)
    assert 0 < distance(weights["actor"], others["actor"]) <= LIMIT
    for one, other in zip(here, there, strict=True):
        funnel = {name: value for name, value in one.items() if "funnel/" in name}
        assert len(funnel) == 11
        assert {name: other[name] for name in funnel} == pytest.approx(funnel, rel=1e-6)


@pytest.mark.slow
def test_several_losses_on_two_ranks_equal_one_process(tmp_path):
    settings = {
        "dtype": "float64",
        "held_out": 0,
        "actor.generate.temperature": 0.7,
        "actor.generate.min_tokens": 5,
    }
    here, weights = run(flows.two_losses, tmp_path / "here", **settings)
    there, others = run(flows.two_losses, tmp_path / "there", pools="all=2@threads", **settings)
    assert steps(there) == steps(here)
    # the flags have reached the ranks: answers end within five tokens
    assert all(line["response/length"] >= 6 for line in there)
    assert [line["centred/heat"] for line in there] == pytest.approx([0.7] * len(there))
    for one, other in zip(here, there, strict=True):
        for name in ("actor.update/likelihood/right", "actor.update/loss", "actor.update/rows"):
            # norms round to float32, and the two ranks hold different prompts
            assert other[name] == pytest.approx(one[name], rel=1e-5)
    assert 0 < distance(weights["actor"], others["actor"]) <= LIMIT


def shard_by_shard(facts, by_group, ranks, *, seed, epochs, minibatch, mean):
    """Plan steps like other frameworks: each rank keeps its shard of the rows, shuffles it alone, and adds
    its part to each minibatch."""
    shards = torch.arange(len(facts)).tensor_split(ranks)
    orders = [
        torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**31 + rank))
        for rank, rows in enumerate(shards)
    ]
    parts = [order.split(minibatch // ranks) for order in orders]
    counts = [facts[rows, 1] for rows in shards]
    totals = [
        sum(int(count[part].sum()) for count, part in zip(counts, step, strict=True))
        for step in zip(*parts, strict=True)
    ]
    rows = [sum(len(part) for part in step) for step in zip(*parts, strict=True)]
    taken = [[(part.numpy(), total) for part, *total in zip(own, totals, rows, strict=True)] for own in parts]
    return RankSteps(list(shards), taken, 0)


@pytest.mark.slow
def test_a_shuffle_within_each_ranks_own_rows_takes_other_steps(tmp_path, single, monkeypatch):
    """Without this test, any split into equally many rows and steps could pass the equality above."""
    here, weights = single
    monkeypatch.setattr(cluster_engine, "rank_steps", shard_by_shard)
    there, others = run("grpo", tmp_path, pools="all=2@threads", **STEPS)
    assert steps(there) == steps(here)
    assert 1000 * LIMIT < distance(weights["actor"], others["actor"]) < 0.1
