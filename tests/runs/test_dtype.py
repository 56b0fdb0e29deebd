"""A float64 run computes only with float64 numbers, from the reward's to the update's."""

import dataclasses
import math
import statistics

import pytest
import torch

import rlflow
from rlflow.author.load import load_flow
from rlflow.execution.store import Store

THIRDS = "def thirds(completion, answer):\n    return len(completion) / 3 + 1e-9 * len(answer)\n"
FLOWS = {
    "grpo": {"beta": 0.1},
    "dapo": {"samples": 2, "groups": 2, "tries": 4, "overlong": 3},
    "gpg": {},
    "ppo_adaptive": {"target_kl": 0.3},
}


@pytest.fixture
def columns_of(task, tmp_path, monkeypatch):
    """The columns that an iteration keeps, by node and name, in the order of their storage."""
    (tmp_path / "thirds.py").write_text(THIRDS)
    task |= {
        "prompts": 2,
        "reward": (f"{tmp_path / 'thirds.py'}:thirds", f"{tmp_path / 'thirds.py'}:thirds:0.7"),
        "held_out": 0,
    }
    kept, put = [], Store.put

    def keeping(store, node, batch, names):
        kept.extend(
            (node.name, output.name, batch.data[output.source])
            for output in node.outputs
            if output.name in names
        )
        put(store, node, batch, names)

    monkeypatch.setattr(Store, "put", keeping)

    def columns_of(name, dtype):
        flow = load_flow(name)
        known = {field.name for field in dataclasses.fields(flow.parameters.hp)}
        small = {"samples": 3, "max_tokens": 5, "minibatch": 4} | FLOWS[name]
        hp = dataclasses.replace(
            flow.parameters.hp, **{key: value for key, value in small.items() if key in known}
        )
        roles = rlflow.roles(flow, hp, dtype=dtype, **task)
        try:
            for _ in range(2):  # the second reads the state that the first has written
                kept.clear()
                outcome = roles.prepared.executor.run(roles.prepared.plan, roles.take())
                roles.prepared.engine.state |= outcome.state
            return list(kept)
        finally:
            roles.close()

    return columns_of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("grpo", "float32"), *((name, "float64") for name in FLOWS)])
def test_every_number_of_a_run_has_the_dtype_of_its_models(columns_of, name, dtype):
    numbers = [
        (node, column, data)
        for node, column, data in columns_of(name, dtype)
        if isinstance(data.value, torch.Tensor) and data.value.is_floating_point()
    ]
    assert {"scores", "advantages", "logprobs"} <= {column for _, column, _ in numbers}
    assert {(node, column, data.kind.dtype) for node, column, data in numbers} == {
        (node, column, dtype) for node, column, _ in numbers
    }
    assert {
        (node, column, data.value.dtype)
        for node, column, data in numbers
        if data.value.dtype is not getattr(torch, dtype)
    } == set()


def test_group_statistics_match_the_rewards_exactly(columns_of):
    found = {column: data for _, column, data in columns_of("grpo", "float64")}
    scores, group, advantages = (
        found["scores"].value.tolist(),
        found["group"].value.tolist(),
        found["advantages"],
    )
    texts, answers = (
        found["completion"].value,
        dict(zip(sorted(set(group)), found["answer"].value, strict=True)),
    )
    assert scores == [
        0.7 * one + one
        for one in (len(text) / 3 + 1e-9 * len(answers[g]) for text, g in zip(texts, group, strict=True))
    ]
    firsts = advantages.value[advantages.lengths.cumsum(0) - advantages.lengths].tolist()
    for score, mine, advantage in zip(scores, group, firsts, strict=True):
        own = [other for other, its in zip(scores, group, strict=True) if its == mine]
        expected = (score - statistics.fmean(own)) / (statistics.stdev(own) + 1e-4)
        assert math.isclose(advantage, expected, rel_tol=1e-12, abs_tol=1e-14)
