"""Scoring during sampling, on pools: the same bits as without it, and an early end leaves nothing hanging."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

import rlflow
from rlflow import StageError
from rlflow.author.load import load
from rlflow.errors import Late
from rlflow.execution.engine import CallOptions, Chunks
from rlflow.training.protocols import Sampling

flows = load(Path(__file__).parent / "flows.py")
TIMES = ("seconds", "response/tokens_per_second")
JUDGE = (
    "def judge(completion, answer):\n    return len(completion) / 7 + (completion[:1] == answer[:1]) / 3\n"
)


def run(folder, **keywords):
    (folder / "judge.py").write_text(JUDGE)
    result = rlflow.run(
        flows.long_tailed,
        out=str(folder),
        prompts=6,
        iterations=3,
        held_out=0,
        threads=1,
        save_every=0,
        reward=[f"{folder / 'judge.py'}:judge"],
        **keywords,
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return (
        metrics,
        (result.folder / "samples.jsonl").read_text(),
        load_file(result.folder / "final/actor/model.safetensors"),
        result,
    )


def spans(result, name):
    """Return (start, end) of each execution of a node, by iteration."""
    lines = (line.strip().strip("[],") for line in (result.folder / "timeline.json").read_text().splitlines())
    events = [json.loads(line) for line in lines if line]
    found = [
        (event["args"]["iteration"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == name and event["cat"] != "rank"
    ]
    return [[(start, end) for i, start, end in found if i == iteration] for iteration in range(3)]


@pytest.mark.slow
def test_streaming_scores_early_and_changes_no_bit(tmp_path):
    metrics, samples, weights, _ = run(tmp_path)
    again, same, others, result = run(tmp_path, pools="train=1@threads,rollout=1@threads", stream=6)
    iterations = list(zip(spans(result, "actor.generate"), spans(result, "reward"), strict=True))
    assert all((len(sampling), len(scoring)) == (6, 6) for sampling, scoring in iterations)
    # on a busy machine, chunks may come faster than a thread wakes up for them, so not in each iteration
    assert any(
        min(start for start, _ in scoring) < max(end for _, end in sampling)
        for sampling, scoring in iterations
    )
    assert again == metrics
    assert same == samples
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


# lengths of 1 to 40 tokens, evenly
UNEVEN = {"hp.samples": 3, "hp.max_tokens": 40, "actor.longest": 40, "actor.tail": 1.0}


SLOWLY = {
    "backend": "null",
    "prompts": 5,
    "iterations": 9,
    "stream": 4,
    "actor.token_seconds": 0.01,
    **UNEVEN,
}


@pytest.fixture
def roles():
    """Two ranks that sample for at least 0.4 s, and one that trains."""
    made = rlflow.roles("ppo", pools="train=1@threads,rollout=2@threads", **SLOWLY)
    yield made
    made.close()


@pytest.fixture
def processes(ray_address):
    """The same ranks as processes."""
    made = rlflow.roles("ppo", pools="train=1,rollout=2", ray_address=ray_address, **SLOWLY)
    yield made
    made.close()


def outcome(roles, rows=5):
    return roles.prepared.executor.run(roles.prepared.plan, roles.prepared.prompts.take(rows))


def test_forwards_are_streamed_too_if_a_backend_is_exact(roles):
    prepared = roles.prepared
    alone = rlflow.roles("ppo", backend="null", prompts=5, **UNEVEN)
    for rows in (5, 1):
        there, here = outcome(roles, rows), outcome(alone, rows)
        assert there.metrics == here.metrics
        assert there.summary == here.summary
        ended = max(span.end for span in there.spans if span.node == "actor.generate")
        for name in ("reward", "reference.logprobs", "critic.values", "actor.logprobs"):
            assert min(span.start for span in there.spans if span.node == name) < ended
        assert all(set(pool.call("held").result()) == {0} for pool in prepared.engine.pools.values())
    alone.close()


def test_missing_chunks_are_awaited_until_the_deadline(roles):
    engine, prompts = roles.prepared.engine, roles.prepared.prompts.take(5)
    with pytest.raises(
        Late,
        match="no answer to 'generate' from rank 0 of pool 'rollout', rank 1 of pool 'rollout' after 0.05 s",
    ):
        next(
            engine.sample_chunks(
                "actor", prompts, Sampling(3, 40), 0, Chunks(4, ()), CallOptions(seconds=0.05)
            )
        )


@pytest.mark.slow
def test_a_worker_that_dies_while_sampling_is_named(processes):
    prepared = processes.prepared
    first = outcome(processes)
    assert first.summary
    score, rollout = prepared.engine.reward, prepared.engine.pools["rollout"]
    victim = ray.get(rollout.actors[1].present.remote()).process.pid

    def kill(*given):
        with contextlib.suppress(ProcessLookupError):  # a second chunk may come before its death is noticed
            os.kill(victim, signal.SIGKILL)
        return score(*given)

    prepared.engine.reward = kill
    with pytest.raises(StageError, match=r"rank 1 of pool 'rollout'.* has died"):
        outcome(processes)
    assert not prepared.executor.store.columns
