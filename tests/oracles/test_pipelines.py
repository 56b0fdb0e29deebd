"""OpenRLHF's complete path from scores and KL to advantages, by rlflow's stages in sequence."""

from pathlib import Path

import torch

from rlflow import gae, group_std, leave_one_out, reward_to_go
from rlflow.algorithms import grpo, ppo, reinforce_pp
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed = registry.as_is, registry.transformed


def group_of(case):
    return torch.arange(len(case.inputs["rewards"])) // case.settings["n_samples_per_prompt"]


def charged(case, scores):
    """Return the scores on the last token, minus the KL coefficient times each token's KL."""
    return reinforce_pp.charge_kl(
        scores,
        case.inputs["kl"],
        case.mask,
        torch.zeros_like(case.inputs["kl"]),
        beta=case.settings["kl_coef"],
    )


def compared(case, advantages, returns):
    assert case.inputs["order"] == list(range(len(advantages)))
    case.agrees(advantages=advantages * case.mask, returns=returns * case.mask)


def biased(white, mask):
    """Rescale whitened entries from the unbiased standard deviation under the mask to the biased one."""
    count = mask.sum()
    return white * (count / (count - 1)).sqrt()


BIASED = "The peer whitens with the biased standard deviation, rlflow with the unbiased one"


@as_is("orlhf-pipe-drgrpo")
def test_dr_grpo(case):
    advantages = grpo.compare(case.inputs["rewards"], group_of(case), case.mask, deviation=False)
    compared(case, advantages, advantages)


@transformed(
    "The peer adds 1e-9 to a group's standard deviation, rlflow adds 1e-4",
    "orlhf-pipe-group",
)
def test_grpo(case):
    scores, group = case.inputs["rewards"], group_of(case)
    quotient = (group_std(scores, group) + 1e-4) / (group_std(scores, group) + 1e-9)
    advantages = grpo.compare(scores, group, case.mask, deviation=True) * quotient[:, None]
    compared(case, advantages, advantages)


@transformed(
    "The peer subtracts the baseline before the KL penalty; rlflow subtracts the KL penalty before the "
    "baseline",
    "orlhf-pipe-rloo",
)
def test_rloo(case):
    scores = case.inputs["rewards"]
    returns = reward_to_go(charged(case, scores - leave_one_out(scores, group_of(case))), case.mask)
    compared(case, returns, returns)


@transformed(BIASED, "orlhf-pipe-rb")
def test_reinforce_pp_with_the_baseline(case):
    rewards = charged(case, reinforce_pp.centre(case.inputs["rewards"], group_of(case)))
    advantages = reinforce_pp.normalised_returns(rewards, case.mask, gamma=1.0)
    compared(case, biased(advantages, case.mask), reward_to_go(rewards, case.mask))


@transformed(BIASED, "orlhf-pipe-reinforce")
def test_reinforce_pp(case):
    rewards = charged(case, case.inputs["rewards"].clamp(*case.settings["reward_clip_range"]))
    advantages = reinforce_pp.normalised_returns(rewards, case.mask, gamma=case.settings["gamma"])
    compared(case, biased(advantages, case.mask), reward_to_go(rewards, case.mask))


@transformed(BIASED, "orlhf-pipe-gae")
def test_ppo(case):
    inputs, settings = case.inputs, case.settings
    rewards = ppo.charge_kl(
        inputs["rewards"], inputs["kl"], case.mask, torch.zeros_like(inputs["kl"]), beta=settings["kl_coef"]
    )
    advantages, returns = gae(
        rewards, inputs["values"], case.mask, gamma=settings["gamma"], lam=settings["lam"]
    )
    compared(case, biased(ppo.normalise(advantages, case.mask), case.mask), returns)
