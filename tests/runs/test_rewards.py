"""Rewards bound to roles: weighted sums, one reward per place of ``*rewards``, and the scorer that decides if
an answer is right."""

from pathlib import Path

import pytest

import rlflow
from rlflow.errors import PlanError

pytestmark = pytest.mark.slow

SEVERAL = """
import torch
from rlflow import flow, group_mean, loss, stage

@stage(gives="total")
def add(r0, r1):
    return r0 + 2 * r1, {"first": r0, "second": r1}

@stage(gives="advantages", rows="group")
def compare(total, group, mask):
    return torch.where(mask, (total - group_mean(total, group))[:, None], 0.0)

@loss
def policy_loss(new, advantages):
    return -new.logprobs * advantages

@flow
def several(prompts, actor, *rewards):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    for i, reward in enumerate(rewards):
        batch |= reward(batch, gives=f"r{i}")
    batch |= add(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)
"""
FUNCTIONS = """
def one(completion):
    return 1.0

def three(completion):
    return 3.0

def nothing(completion):
    return None
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def test_each_reward_is_bound_to_its_place(files, task):
    result = rlflow.run("several.py", **task, reward=("functions.py:three", "functions.py:one"))
    assert (result.last["add/first"], result.last["add/second"]) == (3.0, 1.0)


def test_several_rewards_on_one_role_are_their_weighted_sum(files, task):
    result = rlflow.run(
        "grpo",
        **task,
        **{"hp.samples": 2, "hp.max_tokens": 4},
        reward=("functions.py:three:0.5", "functions.py:one:2"),
    )
    assert result.last["reward/mean"] == 3.5
    assert (result.last["reward/three_mean"], result.last["reward/one_mean"]) == (3.0, 1.0)


def test_a_score_missing_in_one_reward_is_missing_in_the_sum(files, task):
    keywords = {"hp.samples": 2, "hp.max_tokens": 4, "max_missing": 1.0, "max_bad": 0}
    result = rlflow.run("grpo", **task, **keywords, reward=("functions.py:nothing", "functions.py:one"))
    assert result.last["reward/missing_rate"] == 1.0


def test_the_data_decide_if_an_answer_is_right(files, task):
    result = rlflow.run("grpo", **task, **{"hp.samples": 2, "hp.max_tokens": 4}, reward=("functions.py:one",))
    assert result.before.sampled < 1.0


def test_a_function_of_this_file_is_a_reward_and_a_lambda_is_refused(task):
    hp = {"hp.samples": 2, "hp.max_tokens": 4}
    assert rlflow.run("grpo", **task, **hp, reward=always_two).last["reward/mean"] == 2.0
    with pytest.raises(PlanError, match="file"):
        rlflow.run("grpo", **task, **hp, reward=lambda completion: 1.0)


def always_two(completion):
    return 2.0


def test_a_role_may_have_a_reward_of_its_own(files, task):
    result = rlflow.run(
        "grpo", **task, **{"hp.samples": 2, "hp.max_tokens": 4}, **{"reward.reward": "functions.py:three"}
    )
    assert result.last["reward/mean"] == 3.0
    assert Path(result.folder).is_dir()
