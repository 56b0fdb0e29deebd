"""Sampling ahead: numbers decide which weights sample which rows, no row is lost or doubled, and a run that is cut goes on the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow import PlanError
from rlflow.author.load import load_flow
from rlflow.cluster.pool import Pool
from rlflow.runs import resume
from rlflow.watch.reporter import Quiet

pytestmark = pytest.mark.slow
POOLS = {"pools": "train=1,rollout=1"}
TIMES = ("seconds", "response/tokens_per_second")


def test_rows_are_of_the_weights_that_the_staleness_says(ray_address, monkeypatch):
    sent, send = [], Pool.send

    def noted(pool, rank, method, *arguments, **options):
        sent.append(arguments[0].op if method == "run" else f"{method} from {pool.name}")
        return send(pool, rank, method, *arguments, **options)

    monkeypatch.setattr(Pool, "send", noted)
    roles = rlflow.roles("grpo", backend="null", prompts=3, iterations=6, staleness=2, ray_address=ray_address,
                         **{"hp.max_tokens": 16}, **POOLS)
    prepared, positions = roles.prepared, []
    try:
        for iteration in range(6):
            prepared.engine.iteration = iteration
            entry = prepared.ahead.advance(iteration)
            rows = entry.sampled.result().rows
            fetched = [prepared.engine.fetch(batch.select("policy_version")) for batch in rows.values()]
            assert [set(batch.data["policy_version"].value.tolist()) for batch in fetched] == [{max(iteration - 2, 0)}]
            prepared.executor.run(prepared.plan, entry.prompts, entry.sampled)
            prepared.ahead.done(iteration)
            positions += entry.prompts.axis.keys[:, 0].tolist()
        assert positions == list(range(18))
        assert all(pool.call("held").result() == [0] for pool in prepared.engine.pools.values())
        updates = [place for place, what in enumerate(sent) if what == "facts"]
        assert len(updates) == 6
        for place in updates:
            assert "slice from rollout" in sent[:place]  # columns of the pool that samples came before
            assert "slice from rollout" not in sent[place : sent.index("update", place)]
    finally:
        roles.close()


def told(folder):
    """What a run has to say of its iterations, and its last weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return kept, load_file(folder / "final" / "actor" / "model.safetensors")


def test_a_run_that_samples_ahead_goes_on_where_it_was_cut(tmp_path, ray_address):
    run = rlflow.run("grpo", out=str(tmp_path), iterations=4, prompts=6, held_out=0, threads=1, save_every=2, staleness=1,
                     ray_address=ray_address, **POOLS)
    whole, weights = told(run.folder)
    for newer in (run.folder / "checkpoints").glob("step-*4"):  # as if it had been killed after the checkpoint of iteration 2
        newer.rename(tmp_path / "gone")
    (run.folder / "checkpoints" / "latest").unlink(missing_ok=True)
    (run.folder / "final").rename(tmp_path / "final")
    resume.resume(run.folder, {}, Quiet())
    again, others = told(run.folder)
    assert again == whole
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert [line["policy/kl_sampler"] < 1e-9 for line in whole] == [True, False, False, False]


@pytest.mark.parametrize(("pools", "message"), [("all=2", "take turns on pool"), (None, "one pool")])
def test_one_pool_cannot_sample_ahead(pools, message):
    with pytest.raises(PlanError, match=message):
        rlflow.roles(load_flow("ppo"), staleness=1, pools=pools)
