"""Sampling ahead of training: settings decide which weights sample which rows, no row is lost or doubled, and
a resumed run is equal."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow import PlanError
from rlflow.author.figures import Figure, Of
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.cluster.rpc.message import Call
from rlflow.cluster.rpc.pool import Pool
from rlflow.config.roles import loaded_models
from rlflow.errors import Stopped
from rlflow.execution.role_model import Model
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume

POOLS = {"pools": "train=1@threads,rollout=1@threads"}
SMALL = {"iterations": 4, "prompts": 6, "threads": 1, "save_every": 2}
AHEAD = {
    "grpo": {"staleness": 1, "held_out": 8},
    "dapo": {"staleness": 2, "held_out": 0, "hp.groups": 3, "hp.samples": 2},
}
TIMES = ("seconds", "response/tokens_per_second")


def test_the_staleness_decides_which_weights_sample_rows(monkeypatch):
    sent, send, run = [], Pool.send, Pool.run

    def noted(pool, rank, method, *arguments, **options):
        sent.append(f"{method} from {pool.name}")
        return send(pool, rank, method, *arguments, **options)

    def ran(pool, rank, frame, *arguments):
        op = Call.unpacked(frame).op
        sent.extend([f"{op} from {pool.name}", op])
        return run(pool, rank, frame, *arguments)

    monkeypatch.setattr(Pool, "send", noted)
    monkeypatch.setattr(Pool, "run", ran)
    roles = rlflow.roles(
        "grpo", backend="null", prompts=3, iterations=6, staleness=2, **{"hp.max_tokens": 16}, **POOLS
    )
    prepared, positions = roles.prepared, []
    try:
        for iteration in range(6):
            prepared.engine.iteration = iteration
            sampled = prepared.ahead.advance(iteration)
            assert [versions(prepared.engine, rows) for rows in sampled.rows.values()] == [
                {max(iteration - 2, 0)}
            ]
            prepared.executor.run(prepared.plan, sampled.prompts, sampled)
            prepared.ahead.done(iteration)
            positions += sampled.prompts.axis.keys[:, 0].tolist()
        assert positions == list(range(18))
        assert all(pool.call("held").result() == [0] for pool in prepared.engine.pools.values())
        updates = [place for place, what in enumerate(sent) if what == "facts"]
        assert len(updates) == 6
        for place in updates:
            assert "slice from rollout" in sent[:place]  # columns of the pool that the samples came from
            assert "slice from rollout" not in sent[place : sent.index("update", place)]
    finally:
        roles.close()


def versions(engine, rows):
    return set(engine.fetch(rows.select("policy_version")).data["policy_version"].value.tolist())


def test_a_repeat_samples_ahead_and_carries_rows_over():
    roles = rlflow.roles(
        "dapo",
        backend="null",
        prompts=5,
        iterations=6,
        staleness=2,
        pools="train=1@threads,rollout=2@threads",
        **{"hp.max_tokens": 16, "hp.samples": 2, "hp.groups": 4, "hp.overlong": 4},
    )
    prepared, keys, counts = roles.prepared, [], []
    try:
        for iteration in range(5):
            prepared.engine.iteration = iteration
            sampled = prepared.ahead.advance(iteration)
            [rows] = sampled.rows.values()
            assert min(versions(prepared.engine, rows)) >= iteration - 2
            keys += map(tuple, rows.axis.keys.tolist())
            outcome = prepared.executor.run(prepared.plan, sampled.prompts, sampled)
            counted = (
                outcome.metrics[Figure(Of.NODE, name, "repeat.sampled")]
                for name in ("carried", "tries", "surplus", "dropped")
            )
            counts.append(list(map(int, counted)))
            prepared.ahead.done(iteration)
        # the null scores of a group all differ
        assert keys == [(position, sample) for position in range(20) for sample in range(2)]
        assert counts == [[0, 1, 1, 0], [1, 1, 2, 0], [2, 1, 3, 0], [3, 1, 4, 0], [4, 0, 0, 0]]
        stopped_and_saved(prepared, 5)
    finally:
        roles.close()


def stopped_and_saved(prepared, iteration):
    """Check that a stopped iteration can be saved, and that a resumed run has the same rows."""
    prepared.engine.iteration = iteration
    sampled = prepared.ahead.advance(iteration)
    prepared.executor.stopping = True
    with pytest.raises(Stopped):
        prepared.executor.run(prepared.plan, sampled.prompts, sampled)
    state, files = prepared.ahead.saved(iteration)
    assert sorted(files) == ["5.1", "surplus.1.0"]
    prepared.ahead.done(iteration)
    prepared.ahead.restore(state, files)
    assert prepared.ahead.saved(iteration) == (state, files)


def reported(folder):
    """Return a run's metrics and notes by iteration, and its last weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return kept, load_file(folder / "final" / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def ahead_runs(tmp_path_factory):
    """Two runs that sample ahead, and their reports."""
    runs = {
        name: rlflow.run(name, out=str(tmp_path_factory.mktemp(name)), **SMALL, **POOLS, **settings)
        for name, settings in AHEAD.items()
    }
    return {name: (run.folder, *reported(run.folder)) for name, run in runs.items()}


@pytest.mark.slow
def test_the_sampler_uses_the_weights_of_the_previous_iteration(ahead_runs, tmp_path, monkeypatch):
    """Bit for bit equal to a run in one process whose generator gets older weights: data, randomness,
    schedules, the last evaluation."""
    made, evaluation = [], [True] * 3
    newest = iter([*evaluation, *[False] * SMALL["iterations"], *evaluation])

    def lagging(model):
        if model.generator is not None:
            made[model.version :] = [{name: tensor.clone() for name, tensor in model.trainer.weights()}]
            version = model.version if next(newest) else max(model.version - 1, 0)
            model.generator.receive(iter(made[version].items()), version)

    # a generator that can have older weights
    monkeypatch.setattr(loaded_models, "shares_weights", lambda role, options: False)
    monkeypatch.setattr(Model, "stale", True)  # so that its version is read each time
    monkeypatch.setattr(Model, "synchronise", lagging)
    lines, weights = reported(rlflow.run("grpo", out=str(tmp_path), held_out=8, **SMALL).folder)
    assert lines == ahead_runs["grpo"][1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ahead_runs["grpo"][2].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", AHEAD)
def test_only_the_first_iteration_uses_current_weights(ahead_runs, name):
    iterations = [line for line in ahead_runs[name][1] if "reward/mean" in line]
    assert [line["policy/kl_sampler"] < 1e-9 for line in iterations] == [True, False, False, False]


@pytest.mark.slow
def test_a_run_that_samples_ahead_resumes_after_a_kill(ahead_runs, tmp_path):
    """Its queue has carry-over rows of a repeat."""
    folder, lines, weights = ahead_runs["dapo"]
    # as if it had been killed after the checkpoint of iteration 2
    for newer in (folder / "checkpoints").glob("step-*4"):
        newer.rename(tmp_path / "gone")
    (folder / "checkpoints" / "latest").unlink(missing_ok=True)
    (folder / "final").rename(tmp_path / "final")
    iterations = [line for line in lines if "reward/mean" in line]
    assert any(file.startswith("queue/surplus.") for file in load_latest(folder).snapshot.files)
    assert sum(line["repeat.sampled/carried"] for line in iterations[2:]) > 0
    resume.resume(folder, {}, Quiet())
    again, others = reported(folder)
    assert again == lines
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(("pools", "message"), [("all=2", "alternate on pool"), (None, "one pool")])
def test_one_pool_cannot_sample_ahead(pools, message):
    with pytest.raises(PlanError, match=message):
        rlflow.roles(load_flow("ppo"), staleness=1, pools=pools)
