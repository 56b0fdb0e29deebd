"""Made scores of rehearsals: seeded, and unequal within each group."""

import torch

from rlflow.axis import Axis
from rlflow.proof.rehearsal import uneven


def test_scores_are_unequal_within_each_group_and_follow_from_the_seed():
    axis = Axis.fresh(3).repeat(4)
    scores = uneven(1)("reward", axis)
    assert torch.equal(scores, uneven(1)("reward", axis))
    assert not torch.equal(scores, uneven(2)("reward", axis))
    assert all(len(set(group.tolist())) == 4 and float(group.min()) == 0 for group in scores.reshape(3, 4))
    assert [float(group.max()) for group in uneven(2)("reward", axis).reshape(3, 4)] == [1.0] * 3
    assert len({float(group.mean()) for group in scores.reshape(3, 4)}) > 1


def test_rows_without_groups_are_one():
    assert len(set(uneven(1)("reward", Axis.fresh(5)).tolist())) == 5


def test_one_reward_of_several_can_have_other_scores_alone():
    axis = Axis.fresh(6)
    assert torch.equal(uneven(3, only="other")("reward", axis), uneven(0)("reward", axis))
    assert not torch.equal(uneven(3, only="reward")("reward", axis), uneven(0)("reward", axis))
