"""The gradient of KL as a term of a loss. The test enumerates every token and compares with the gradient of
the KL itself.
"""

import math

import pytest
import torch

from rlflow import kl_penalty

SEEDS = torch.Generator().manual_seed(0)
LOGITS, OLD, REFERENCE = (torch.randn(6, dtype=torch.float64, generator=SEEDS) for _ in range(3))


def expected_gradient(estimator, old):
    """Return the gradient of the penalty's mean over tokens of the old policy, by the policy's logits."""
    logits = LOGITS.clone().requires_grad_()
    old, reference = old.log_softmax(0), REFERENCE.log_softmax(0)
    (old.exp() * kl_penalty(logits.log_softmax(0), old, reference, estimator)).sum().backward()
    return logits.grad


def true_gradient(forward=False):
    logits = LOGITS.clone().requires_grad_()
    policy, reference = logits.log_softmax(0), REFERENCE.log_softmax(0)
    (
        reference.exp() * (reference - policy) if forward else policy.exp() * (policy - reference)
    ).sum().backward()
    return logits.grad


@pytest.mark.parametrize(
    ("estimator", "old"), [("k2", LOGITS), ("k3-weighted", LOGITS), ("k3-weighted", OLD)]
)
def test_the_expected_gradient_is_the_gradient_of_the_kl(estimator, old):
    torch.testing.assert_close(expected_gradient(estimator, old), true_gradient())


def test_k3_descends_the_forward_kl():
    torch.testing.assert_close(expected_gradient("k3", LOGITS), true_gradient(forward=True))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_tokens_of_another_policy_give_another_gradient(estimator):
    assert float((expected_gradient(estimator, OLD) - true_gradient()).norm()) > 0.1


@pytest.mark.parametrize(
    ("estimator", "why"), [("k1", "use it in the reward"), ("k4", "choose one by its gradient")]
)
def test_an_estimator_without_a_loss_is_refused(estimator, why):
    with pytest.raises(
        ValueError, match=f"found estimator '{estimator}', expected 'k2', 'k3' or 'k3-weighted'; .*{why}"
    ):
        kl_penalty(torch.zeros(1), torch.zeros(1), torch.zeros(1), estimator)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-weighted"])
def test_a_missing_token_stays_missing_alone(estimator):
    penalty = kl_penalty(
        torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0]), estimator
    )
    assert penalty.isnan().tolist() == [True, False]
