"""Metrics of the algorithms against hand computations. Users watch these numbers, and no code reads them."""

from types import SimpleNamespace

import pytest
import torch

from rlflow.algorithms import (
    cispo,
    clip_cov,
    dapo,
    distill,
    dpo,
    gmpo,
    gpg,
    grpo,
    gspo,
    online_dpo,
    ppo,
    ppo_adaptive,
    prime,
    reinforce_pp,
    remax,
    reward_model,
    rloo,
    sft,
    spo,
)

RATIOS = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 6.0]
BOTH = [0.5, 0.79, 1.21, 1.27, 1.29, 6.0]  # outside of 1 ± 0.2
CLIPPED = {
    "ppo": (ppo.policy_loss, {"clip": 0.2}, BOTH),
    "ppo with dual clip": (ppo.policy_loss, {"clip": 0.2, "dual": 3.0}, BOTH),
    "grpo": (grpo.policy_loss, {"clip": 0.2, "beta": 0.0}, BOTH),
    "rloo": (rloo.policy_loss, {"clip": 0.2}, BOTH),
    "remax": (remax.policy_loss, {"clip": 0.2}, BOTH),
    "reinforce_pp": (reinforce_pp.policy_loss, {"clip": 0.2}, BOTH),
    "distill": (distill.policy_loss, {"clip": 0.2}, BOTH),
    "prime": (prime.policy_loss, {"clip": 0.2}, BOTH),
    "clip_cov": (clip_cov.policy_loss, {"form": "clip", "clip": 0.2, "beta": 1.0}, BOTH),
    "dapo": (dapo.policy_loss, {"low": 0.2, "high": 0.28}, [0.5, 0.79, 1.29, 6.0]),
    "spo": (spo.policy_loss, {"low": 0.2, "high": 0.28}, [0.5, 0.79, 1.29, 6.0]),
    "gspo": (gspo.policy_loss, {"low": 0.2, "high": 0.28}, [0.5, 0.79, 1.29, 6.0]),
    "cispo": (cispo.policy_loss, {"cap": 5.0}, [6.0]),
}


def logged(loss, settings, **columns):
    """Return the metrics of a loss on one token per row, with RATIOS as the ratios to the old policy."""
    ratio = torch.tensor(RATIOS, dtype=torch.float64)[:, None]
    given = {
        "logprobs": torch.zeros_like(ratio),
        "advantages": torch.ones_like(ratio),
        "weights": torch.ones_like(ratio),
        "mask": torch.ones_like(ratio, dtype=torch.bool),
        "held": torch.zeros_like(ratio, dtype=torch.bool),
    } | columns
    new = SimpleNamespace(logprobs=ratio.log())
    return loss(new, *(given.get(parameter.name) for parameter in loss.signature.columns), **settings)[1]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_counts_tokens_outside_the_trust_region(name):
    loss, settings, expected = CLIPPED[name]
    clipped = logged(loss, settings)["clipped"].flatten().tolist()
    assert [ratio for ratio, out in zip(RATIOS, clipped, strict=True) if out] == expected


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, [1.29, 6.0]), (-1.0, [0.5, 0.79, 0.81])])
def test_gmpo_clips_only_if_that_lowers_the_gain(advantage, expected):
    advantages = torch.full((len(RATIOS), 1), advantage, dtype=torch.float64)
    clipped = (
        logged(gmpo.policy_loss, {"low": 0.2, "high": 0.25}, advantages=advantages)["clipped"]
        .flatten()
        .tolist()
    )
    assert [ratio for ratio, out in zip(RATIOS, clipped, strict=True) if out] == expected


MARGINS = torch.tensor([2.0, 1.0, -1.0, 3.0, 0.5, 0.5])  # three pairs, chosen first: right, wrong, equal


def test_a_reward_model_is_right_if_chosen_scores_higher():
    metrics = reward_model.prefer(SimpleNamespace(scores=MARGINS), centre=0.0)[1]
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["gap"].tolist() == [1.0, -4.0, 0.0]


@pytest.mark.parametrize("form", ["sigmoid", "ipo"])
def test_dpo_is_right_if_chosen_gained_more_on_the_reference(form):
    reference, mask = torch.full((6, 1), -0.25), torch.ones(6, 1, dtype=torch.bool)
    metrics = dpo.prefer(
        SimpleNamespace(logprobs=MARGINS[:, None] - 0.25), reference, mask, beta=0.1, form=form
    )[1]
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["gap"].tolist() == [1.0, -4.0, 0.0]


def test_online_dpo_scores_by_the_sign_of_each_response():
    reference, mask = torch.zeros(6, 1), torch.ones(6, 1, dtype=torch.bool)
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    metrics = online_dpo.prefer(SimpleNamespace(logprobs=MARGINS[:, None]), reference, sign, mask, beta=0.1)[
        1
    ]
    assert metrics["accuracy"].tolist() == [1.0, 1.0, 0.0]
    assert metrics["gap"].tolist() == [1.0, 4.0, 0.0]
    signs, counted = online_dpo.compare(torch.tensor([0.3, 0.9, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]))
    assert counted["tied"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert signs[:2].tolist() == [-1.0, 1.0]
    assert bool(signs[2:].isnan().all())


def test_prime_is_right_if_its_reward_and_the_score_agree():
    new, mask = (
        SimpleNamespace(logprobs=torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])),
        torch.ones(4, 1, dtype=torch.bool),
    )
    scores = torch.tensor([1.0, 0.0, 0.5, 0.0])
    metrics = prime.outcome_loss(new, torch.zeros(4, 1), scores, mask, beta=0.1, correct=0.5)[1]
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_other_metrics_match_hand_computations():
    mask = torch.tensor([[True, True], [True, False]])
    group, scores = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1.0, 0.0, 0.5, 0.5, torch.nan])
    # four scores, two in a mixed group
    assert float(gpg.compare(scores, group, torch.ones(5, 1, dtype=torch.bool))[1]["alpha"]) == 4 / 2
    kl = distill.judge(
        torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.tensor([[-2.0, -2.0], [-1.0, 0.0]]), mask
    )[1]["reverse_kl"]
    assert kl.tolist() == [[1.0, 0.0], [-2.0, 0.0]]
    assert sft.likelihood(SimpleNamespace(logprobs=torch.tensor([0.5]).log()))[1]["probability"].tolist() == [
        0.5
    ]
    logprobs = torch.tensor([[-1.0, -1.0], [-2.0, 9.0]])
    adapted = ppo_adaptive.adapt(
        torch.tensor(0.1), logprobs, torch.tensor([[-2.0, -3.0], [-2.0, -9.0]]), mask, target=1.0, horizon=10
    )[1]
    assert float(adapted["kl"]) == 1.5  # 3 nats of the first response, 0 of the second
    assert float(adapted["beta"]) == pytest.approx(0.1)


def test_clip_cov_logs_its_share_and_the_highest_covariance():
    logprobs, mask = torch.tensor([[-0.1, -2.0], [-3.0, -0.9]]), torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    held, metrics = clip_cov.hold(
        logprobs, advantages, mask, form="kl", share=0.5, low=0.0, high=9.0, generator=torch.Generator()
    )
    assert torch.equal(metrics["held"], held.float())
    assert held.tolist() == [[True, False], [True, False]]
    deviations = logprobs - logprobs.mean()
    torch.testing.assert_close(metrics["covariance_max"], deviations * advantages)
