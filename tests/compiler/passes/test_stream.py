"""Nodes that a plan streams, by backend and by reward."""

import json

import pytest

import rlflow.data.tasks
from rlflow.backends import null
from rlflow.errors import PlanError

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
TWO = "--pools train=1,rollout=1"
FORWARDS = "actor.logprobs, reference.logprobs, critic.values"


def streamed(explanation):
    return next(note.what for note in explanation.notes if note.name == "stream")


@pytest.fixture
def reward_model(tmp_path):
    """Return a folder with a reward model."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForSequenceClassification"], "num_labels": 1})
    )
    return tmp_path


def test_the_null_backend_also_streams_forwards(planned_as):
    local, none = planned_as(f"ppo --model {MODEL} {TWO} --stream 3"), planned_as(f"ppo {TWO} --stream 3")
    assert (
        streamed(local)
        == f"actor.generate gives 3 chunks to reward; not to {FORWARDS} (rounding depends on the other rows)"
    )
    assert (
        streamed(none)
        == "actor.generate gives 3 chunks to reward, actor.logprobs, reference.logprobs, critic.values"
    )
    assert {
        step["name"]: step["chunks"] for step in none.as_json()["nodes"] if step["chunks"] > 1
    } == dict.fromkeys(("reward", "actor.logprobs", "reference.logprobs", "critic.values"), 3)
    assert {pair.second for pair in none.pairs if pair.first == "actor.generate"} == {
        "reward",
        *FORWARDS.split(", "),
    }
    assert none.time.makespan < planned_as(f"ppo {TWO}").time.makespan


def test_a_reward_model_is_streamed_if_its_backend_is_exact(planned_as, reward_model):
    local, with_reward_model = (
        f"grpo --model {MODEL} {TWO} --stream 2 --reward math",
        f"--reward {reward_model}",
    )
    assert "to reward" in streamed(planned_as(local))
    assert "to reward" in streamed(planned_as(f"grpo --stream 2 --reward math {with_reward_model}"))
    with pytest.raises(PlanError, match="nothing in flow 'grpo' can be scored before") as refused:
        planned_as(f"{local} {with_reward_model}")
    assert (
        "not to reward, actor.logprobs (rounding depends on the other rows)"
        in refused.value.problems[0].found
    )


def test_a_backend_without_chunks_streams_nothing(planned_as, monkeypatch):
    monkeypatch.setattr(null, "Generator", type("Whole", (null.Generator,), {"generate_chunks": None}))
    with pytest.raises(PlanError, match="the generator of actor gives all rows at once"):
        planned_as("grpo --stream 2")
