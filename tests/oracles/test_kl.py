"""Estimates of the KL to the reference, in the reward and as a loss."""

from pathlib import Path

import pytest
import torch

from rlflow import adapted_beta, kl, kl_penalty
from rlflow.algorithms import ppo
from rlflow.author.load import load
from rlflow.author.settings import override
from rlflow.errors import PlanError

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed = registry.as_is, registry.transformed


def compared(case, logprobs, value):
    case.agrees(kl=value, grad_logprob=torch.autograd.grad(value.sum(), logprobs)[0])


def inputs_of(case):
    return case.inputs["logprob"].clone().requires_grad_(), case.inputs["ref_logprob"]


def near(logprobs, reference, limit=20.0):
    """Return reference log-probs whose log-ratio to ``logprobs`` is within [-limit, limit]. Some peers clamp
    the log-ratio before they compute an estimate.
    """
    return logprobs + (reference - logprobs).clamp(-limit, limit)


@as_is("verl-kl-k1", "slime-kl-k1", "slime-kl-k3")
def test_kl_without_a_clamp(case):
    logprobs, reference = inputs_of(case)
    compared(case, logprobs, kl(logprobs, reference, case.settings["kind"]))


@transformed(
    "The peer clamps the log-ratio to [-20, 20] and the estimate to [-10, 10]; rlflow does not clamp",
    "verl-kl-k3",
    "verl-kl-low_var_kl",
)
def test_kl_clamped_on_both_sides(case):
    logprobs, reference = inputs_of(case)
    compared(case, logprobs, kl(logprobs, near(logprobs, reference), "k3").clamp(-10, 10))


@transformed(
    "The peer clamps the estimate to [-10, 10]; rlflow does not clamp",
    "orlhf-kl-k1",
    "orlhf-kl-k3",
)
def test_kl_clamped(case):
    logprobs, reference = inputs_of(case)
    compared(case, logprobs, kl(logprobs, reference, case.settings["kind"]).clamp(-10, 10))


@transformed(
    "The peer's estimate has the value of k3, clamped as in `verl-kl-k3`, and the gradient of k2. The test "
    "combines rlflow's k3 and k2",
    "verl-kl-k3+",
)
def test_kl_with_the_gradient_of_another(case):
    logprobs, reference = inputs_of(case)
    value, slope = kl(logprobs, near(logprobs, reference), "k3").clamp(-10, 10), kl(logprobs, reference, "k2")
    compared(case, logprobs, value.detach() + slope - slope.detach())


@transformed(
    "The peer clamps the log-ratio to [-20, 20] and the estimate to [-10, 10]. The peer then multiplies the "
    "estimate by exp(logp - sg(logp)), where sg stops the gradient. If the log-ratio is clamped, this "
    "factor has no gradient",
    "nemo-kl-k1",
    "nemo-kl-k3",
)
def test_kl_weighted_for_the_gradient_of_its_expectation(case):
    logprobs, reference = inputs_of(case)
    free = (reference - logprobs).abs() <= 20
    weight = torch.where(free, logprobs - logprobs.detach(), 0.0).exp()
    compared(
        case, logprobs, weight * kl(logprobs, near(logprobs, reference), case.settings["kind"]).clamp(-10, 10)
    )


@transformed(
    "The peer takes the policy ratio as input, rlflow the log-probs before the update",
    "slime-kl-unbiased",
)
def test_kl_weighted_by_the_ratio(case):
    now, ratio = case.inputs["logprob"], case.inputs["importance_ratio"]
    case.agrees(kl=kl_penalty(now, now - ratio.log(), case.inputs["ref_logprob"], "k3-weighted"))


@transformed(
    "The peer has one score per token, rlflow one per response. The test adds the peer's scores to rlflow's "
    "KL penalty",
    "verl-kl-reward",
)
def test_the_charge_on_rewards_of_tokens(case):
    inputs, none = case.inputs, torch.zeros(3, dtype=torch.float64)
    charge = ppo.charge_kl(
        none, inputs["old_log_prob"], case.mask, inputs["ref_log_prob"], beta=case.settings["kl_ratio"]
    )
    case.agrees(rewards=inputs["token_level_scores"] + charge)


@transformed(
    {
        "orlhf-klrew-1": (
            "The peer subtracts the KL penalty at padding too, and masks padding later. The test does not "
            "compare padding"
        ),
        "orlhf-klrew-3": (
            "The peer replaces a negative KL coefficient with 0; rlflow refuses a negative coefficient"
        ),
    }
)
def test_the_charge_on_scores(case):
    inputs, beta = case.inputs, max(case.settings["kl_coef"], 0.0)
    got = ppo.charge_kl(inputs["r"], inputs["kl"], case.mask, torch.zeros_like(inputs["kl"]), beta=beta)
    case.agrees(where=case.mask, rewards=got)


@as_is("verl-kl-adaptive")
def test_the_kl_coefficient_follows_its_target(case):
    settings, beta = case.settings, torch.tensor(case.settings["init_kl_coef"], dtype=torch.float64)
    prices = []
    for observed in case.inputs["observed_kl"]:
        beta = adapted_beta(
            beta,
            torch.tensor(observed),
            target=settings["target_kl"],
            rate=settings["n_steps"] / settings["horizon"],
        )
        prices.append(float(beta))
    case.agrees(coef_after_each_update=prices)


def test_a_negative_kl_coefficient_is_refused():
    with pytest.raises(PlanError, match="beta"):
        override(ppo.PPO(), {"beta": "-1.0"}, "hp.")


@as_is("inv-kl-gradient")
def test_the_expected_gradient_of_each_estimate(case):
    """Compare the expectation of each estimate over the vocabulary. k1 and k3 have the value of the KL. As
    losses, k1 has a gradient of 0 and k2 has the gradient of the KL.
    """
    logits = case.inputs["logits"].clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    true = (logprobs.exp() * (logprobs - case.inputs["ref_logprobs"])).sum()
    got = {"true_kl": true, "grad_true_kl": torch.autograd.grad(true, logits, retain_graph=True)[0]}
    for name in ("k1", "k2", "k3"):
        loss = (logprobs.exp().detach() * kl(logprobs, case.inputs["ref_logprobs"], name)).sum()
        got |= {
            f"value_{name}": loss,
            f"grad_loss_{name}": torch.autograd.grad(loss, logits, retain_graph=True)[0],
        }
    case.agrees(**got)
