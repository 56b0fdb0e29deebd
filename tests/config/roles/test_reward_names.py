"""The rewards that score each role."""

import pytest

from rlflow import flow
from rlflow.config.roles.rewards import RewardNames
from rlflow.runs.api import resolve_config


@flow
def one(prompts, actor, judge_1, x_7, judge):
    pass


@flow
def several(prompts, actor, judge_1, *judges):
    pass


def names(made, folder):
    (folder / "a.py").write_text("def f(completion): return 1.0\ndef g(completion): return 2.0\n")
    return RewardNames.of(
        resolve_config(made, None, {"backend": "null", "reward": [f"{folder}/a.py:f", f"{folder}/a.py:g"]})[
            0
        ],
        made,
    )


@pytest.mark.parametrize("role", ["judge_1", "x_7", "judge"])
def test_a_single_reward_role_has_all_rewards(role, tmp_path):
    assert [spec.function for spec in names(one, tmp_path).of_role(role)] == ["f", "g"]


def test_each_of_several_reward_roles_has_the_reward_at_its_position(tmp_path):
    found = names(several, tmp_path)
    assert {
        role: [spec.function for spec in found.of_role(role)] for role in ("judges_0", "judges_1", "judge_1")
    } == {"judges_0": ["f"], "judges_1": ["g"], "judge_1": ["f", "g"]}
