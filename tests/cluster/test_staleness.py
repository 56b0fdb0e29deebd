"""Sampling ahead: which weights sample which rows is decided by numbers, no row is lost or doubled, and a run that is cut goes on the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow import PlanError
from rlflow.author.load import load_flow
from rlflow.runs import resume
from rlflow.watch.reporter import Quiet

pytestmark = pytest.mark.slow
POOLS = {"pools": "train=1,rollout=1"}
TIMES = ("seconds", "response/tokens_per_second")


def test_rows_are_of_the_weights_that_the_staleness_says(ray_address):
    roles = rlflow.roles("grpo", backend="null", prompts=3, iterations=6, staleness=2, ray_address=ray_address, **POOLS)
    prepared, positions = roles.prepared, []
    try:
        for iteration in range(6):
            prepared.engine.iteration = iteration
            entry = prepared.ahead.advance(iteration)
            rows = entry.sampled.result().rows
            versions = [prepared.engine.fetch(batch.select("policy_version"))["policy_version"] for batch in rows.values()]
            assert [set(version.flatten().tolist()) for version in versions] == [{max(iteration - 2, 0)}]
            prepared.executor.run(prepared.plan, entry.prompts, entry.sampled)
            prepared.ahead.done(iteration)
            positions += entry.prompts.axis.keys[:, 0].tolist()
        assert positions == list(range(18))
        assert all(pool.call("held").result() == [0] for pool in prepared.engine.pools.values())
    finally:
        roles.close()


def test_a_run_that_samples_ahead_goes_on_where_it_was_cut(tmp_path, ray_address):
    settings = {"prompts": 6, "held_out": 0, "threads": 1, "save_every": 2, "staleness": 1, "ray_address": ray_address, **POOLS}
    whole = rlflow.run("grpo", out=str(tmp_path / "whole"), iterations=4, **settings)
    cut = rlflow.run("grpo", out=str(tmp_path / "cut"), iterations=4, **settings)
    for newer in (cut.folder / "checkpoints").glob("step-*4"):  # as if it had been killed after the checkpoint of iteration 2
        newer.rename(tmp_path / "gone")
    (cut.folder / "checkpoints" / "latest").unlink(missing_ok=True)
    resume.resume(cut.folder, {}, Quiet())
    lines = [[json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()] for run in (whole, cut)]
    kept = [[{name: value for name, value in line.items() if name not in TIMES} for line in run] for run in lines]
    assert kept[0] == kept[1]
    one, other = (load_file(run.folder / "final" / "actor" / "model.safetensors") for run in (whole, cut))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert [line["policy/kl_sampler"] < 1e-9 for line in kept[0]] == [True, False, False, False]


@pytest.mark.parametrize(("pools", "message"), [("all=2", "on one pool"), (None, "one pool")])
def test_one_pool_cannot_sample_ahead(pools, message, ray_address):
    with pytest.raises(PlanError, match=message):
        rlflow.roles(load_flow("ppo"), staleness=1, pools=pools, ray_address=ray_address if pools else None)
