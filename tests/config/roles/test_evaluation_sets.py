"""Additional held-out sets: their names, their fields, and their judges."""

import json

import pytest

from rlflow import PlanError
from rlflow.algorithms.grpo import grpo
from rlflow.author.columns import field_column
from rlflow.config.flags import sort_rewards, sort_values
from rlflow.config.roles.evaluation_sets import open_sets, set_paths
from rlflow.config.roles.rewards import RewardNames, Rewards
from rlflow.data.json_fields import NOTHING

GRADE = """
def grade(completion, aim):
    return {"score": float(completion == str(aim["value"])), "pred": completion[:1]}
"""


@pytest.fixture
def ground(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    (tmp_path / "other.jsonl").write_text(
        "".join(json.dumps({"ask": f"{n} + 1 =", "aim": {"value": n + 1}}) + "\n" for n in range(3))
    )
    (tmp_path / "judge.py").write_text(GRADE)
    return tmp_path


def config(ground, sets=("other={}/other.jsonl",), **values):
    written = {
        "data": (f"{ground}/train.jsonl",),
        "eval": tuple(text.format(ground) for text in sets),
        **values,
    }
    return sort_values(written, ["actor", "reward"])


def opened(config, wanted=lambda name: NOTHING):
    return open_sets(config.options, config.data, None, wanted)


@pytest.mark.parametrize(
    ("sets", "words", "remedy"),
    [
        (("{}/other.jsonl",), "has no name", "--eval other="),
        (("train={}/other.jsonl",), "'train' of a held-out set is taken", "train_test="),
        (("a={0}/other.jsonl", "a={0}/train.jsonl"), "'a' of a held-out set is taken", "--eval a_test="),
        (("greedy={}/other.jsonl",), "'greedy' of a held-out set is taken", ""),
        (("actor={}/other.jsonl",), "'actor' of a held-out", ""),
        (("a={}/other.jsonl:0.5",), "'a' has a weight", "--eval a="),
    ],
)
def test_a_set_has_its_own_name_and_no_weight(ground, sets, words, remedy):
    with pytest.raises(PlanError, match=words) as error:
        set_paths(config(ground, sets).options, ["actor"])
    assert remedy in error.value.problems[0].remedy


def test_fields_of_a_set_override_fields_for_all_sets(ground):
    own = config(ground, **{"data.other.prompt": "ask", "data.train.prompt": "prompt", "data.min_terms": "2"})
    sets = opened(own)
    assert [record.prompt for record in sets["other"].records] == ["0 + 1 =", "1 + 1 =", "2 + 1 ="]
    assert len(opened(config(ground, **{"data.prompt": "ask"}))["other"]) == 3
    with pytest.raises(PlanError, match=r"no such data: .*gone\.jsonl"):
        opened(config(ground, ("gone={}/gone.jsonl",)))


def judge_of(config, rewards=None):
    names = RewardNames.of(config, grpo)
    data = opened(config, names.wanted_of_set)["other"]
    rewards = Rewards(names, data, config.options, None)
    try:
        judge = rewards.judge_of_set("other", data)
        batch = data.batch(range(len(data)))
        return judge, batch
    finally:
        rewards.close()


def test_a_reward_for_a_set_scores_only_the_set_and_does_not_train(ground):
    own = config(ground, reward=("task", f"{ground}/judge.py:grade@other:3"), **{"data.other.prompt": "ask"})
    assert (own.options.reward, len(own.judges)) == (("task",), 1)
    judge, batch = judge_of(own)
    assert judge.rewards[""].name == "grade"
    assert judge.rewards[""].weight == 1.0
    assert field_column("aim") in batch.columns


def test_a_set_without_answers_and_rewards_needs_a_judge(ground):
    with pytest.raises(PlanError, match="no reward can score the held-out set 'other'") as error:
        judge_of(config(ground, **{"data.other.prompt": "ask"}))
    assert "--data.other.answer FIELD" in error.value.problems[0].remedy


def test_a_judge_that_reads_a_missing_field_is_an_error(ground):
    with pytest.raises(
        PlanError, match="reads 'answer', which the held-out set 'other' does not have"
    ) as error:
        judge_of(config(ground, reward=("math@other",), **{"data.other.prompt": "ask"}))
    assert "--data.other.answer FIELD" in error.value.problems[0].remedy


def test_a_set_has_exactly_one_judge(ground):
    for rewards in (("math@other", "task@other"), (f"{ground}@other",)):
        (ground / "config.json").write_text("{}")
        with pytest.raises(PlanError, match="needs exactly one correctness reward"):
            RewardNames.of(config(ground, reward=rewards), grpo)


@pytest.mark.parametrize(
    ("rewards", "judges"),
    [
        (("math", "task@a"), ("task@a",)),
        (("f.py:g@a.b:0.5",), ("f.py:g@a.b:0.5",)),
        (("task@ab",), ()),
        (("http://host:80/x@a:2",), ("http://host:80/x@a:2",)),
        (("http://a@host/x",), ()),
        ((), ()),
    ],
)
def test_a_reward_named_like_a_set_scores_only_that_set(rewards, judges):
    training, found = sort_rewards({"reward": rewards, "eval": ("a=x.jsonl", "a.b=y.jsonl")})
    assert found == judges
    assert (*training, *found) == rewards
