"""PRIME's arithmetic by hand: process rewards, and the reward model's loss on outcomes."""

import math
from types import SimpleNamespace

import pytest
import torch

from rlflow import reward_to_go
from rlflow.algorithms import prime

NAN = math.nan
GROUP = torch.zeros(3, dtype=torch.int64)
MASK = torch.tensor([[True, True], [True, False], [True, True]])
# log-ratios to a reference of 0: response means 3, 6 and 0
PRM = torch.tensor([[2.0, 4.0], [6.0, NAN], [0.0, 0.0]])


def rewards(scores, prm=PRM, beta=0.5):
    return prime.reward_tokens(prm, torch.zeros_like(prm), torch.tensor(scores), GROUP, MASK, beta=beta)


def test_tokens_get_implicit_rewards_and_the_last_one_the_outcome():
    found = rewards([1.0, 0.0, 0.0])
    assert found[0].tolist() == [0.5 * (2 - 3), 0.5 * (4 - 3) + 1]
    assert found[1].tolist() == [0.5 * (6 - 1.5) - 0.5, 0.0]
    assert found[2].tolist() == pytest.approx([0.5 * (0 - 4.5), 0.5 * (0 - 4.5) - 0.5])


def test_a_reward_model_equal_to_the_reference_gives_the_outcome():
    found = reward_to_go(rewards([1.0, 0.0, 0.0], prm=torch.where(MASK, 0.0, NAN)), MASK)
    assert found.tolist() == [[1.0, 1.0], [-0.5, 0.0], [-0.5, -0.5]]  # leave-one-out, like RLOO


def test_a_missing_score_skips_only_its_row():
    found = prime.normalised_returns(rewards([1.0, NAN, 0.0]), MASK, gamma=1.0)
    assert bool(found[1].isnan().any())
    assert bool(found[[0, 2]].isfinite().all())
    assert float(found[[0, 2]].mean()) == pytest.approx(0, abs=1e-6)


def test_the_reward_model_learns_from_outcomes_by_full_responses():
    new = PRM.clone().requires_grad_()
    value, metrics = prime.outcome_loss(
        SimpleNamespace(logprobs=new),
        torch.zeros(3, 2),
        torch.tensor([1.0, 0.2, 0.5]),
        MASK,
        beta=0.5,
        correct=0.5,
    )
    torch.testing.assert_close(value, -torch.nn.functional.logsigmoid(torch.tensor([3.0, -3.0, 0.0])))
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0]
    value.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([-0.5 * (1 - 1 / (1 + math.exp(-3)))] * 2)
    assert float(new.grad[1, 1]) == 0.0
