"""Hub names among the values of flags. Paths that exist, and other values, stay as they are."""

import pytest

from rlflow.config.hub_values import resolve_hub_names, same_name
from rlflow.rewards.reward_spec import model_text

A, B = "a" * 40, "b" * 40


def test_without_hub_names_values_stay_the_same_objects(tmp_path):
    (tmp_path / "org").mkdir()
    values = {
        "model": str(tmp_path),
        "actor.model": "own",
        "data": ["train.jsonl:0.5", "chain_sum"],
        "eval": ("test=test.csv",),
        "reward": ["task", "rewards/mine.py:score:0.5", "http://host/name"],
        "hp.model": "org/name",
        "data.reward": "org/name",
        "out": "org/name",
    }
    resolved = resolve_hub_names(values)
    assert resolved.values == resolved.local == values
    assert resolved.models == resolved.written(values) == {}


@pytest.mark.parametrize(
    ("written", "pinned"),
    [
        ("org/name", f"org/name@{A}"),
        ("org/name@main", f"org/name@{A}"),
        ("g=org/d:main/test:0.5", f"g=org/d@{A}:main/test:0.5"),
        (["org/d", "own.jsonl"], (f"org/d@{A}", "own.jsonl")),
        (f"org/name@{A}", f"org/name@{A}"),
    ],
)
def test_a_name_without_a_commit_keeps_the_pinned_one(written, pinned):
    assert same_name(written, pinned)


@pytest.mark.parametrize(
    ("written", "pinned"),
    [
        (f"org/name@{B}", f"org/name@{A}"),
        ("org/other", f"org/name@{A}"),
        ("org/d:main", f"org/d@{A}:other"),
        (["org/d"], [f"org/d@{A}", "own.jsonl"]),
        ("org/name", None),
    ],
)
def test_another_name_is_another(written, pinned):
    assert not same_name(written, pinned)


@pytest.mark.parametrize(
    ("reward", "model"),
    [
        ("org/judge", "org/judge"),
        ("org/judge@train:0.5", "org/judge"),
        (f"org/judge@{A}", f"org/judge@{A}"),
        (f"org/judge@{A}@train:0.5", f"org/judge@{A}"),
        ("math:0.5", "math"),
    ],
)
def test_the_model_in_a_reward(reward, model):
    assert model_text(reward) == model
