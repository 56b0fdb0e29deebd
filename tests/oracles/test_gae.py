"""Generalised advantage estimation, from the KL charge to the whitened advantages."""

from pathlib import Path

import pytest
import torch

from rlflow import gae, place_last, whiten
from rlflow.algorithms import ppo
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
CASES, as_is, transformed = registry.CASES, registry.as_is, registry.transformed


def rewards_of(case):
    return (
        case.inputs["token_level_rewards"]
        if "token_level_rewards" in case.inputs
        else place_last(case.inputs["rewards"], case.mask)
    )


def discounts(case):
    settings = case.settings
    return {
        "gamma": settings.get("gamma", settings.get("gae_gamma")),
        "lam": settings.get("lam", settings.get("gae_lambda")),
    }


@as_is("verl-gae-1", "verl-gae-3", "verl-gae-5")
def test_gae_and_whitening(case):
    advantages, returns = gae(rewards_of(case), case.inputs["values"], case.mask, **discounts(case))
    whitened = ppo.normalise(advantages, case.mask)
    case.agrees(
        advantages_raw=advantages * case.mask,
        advantages_whitened=whitened * case.mask,
        returns=returns * case.mask,
    )


@as_is("nemo-gae-1")
def test_gae_of_scores(case):
    advantages, returns = gae(rewards_of(case), case.inputs["values"], case.mask, **discounts(case))
    case.agrees(advantages=ppo.normalise(advantages, case.mask) * case.mask, returns=returns * case.mask)


@as_is("slime-gae-1", "orlhf-gae-1")
def test_gae_not_whitened(case):
    advantages, returns = gae(rewards_of(case), case.inputs["values"], case.mask, **discounts(case))
    case.agrees(advantages=advantages * case.mask, returns=returns * case.mask)


@as_is("inv-gae-nanpad")
def test_values_in_padding_and_masked_tokens_have_no_effect(case):
    values, rewards = (
        torch.where(case.mask, case.inputs[name], torch.nan) for name in ("values", "token_level_rewards")
    )
    advantages, returns = gae(rewards, values, case.mask, **discounts(case))
    whitened = ppo.normalise(advantages, case.mask)
    case.agrees(
        **{
            name: torch.where(case.mask, x, 0.0)
            for name, x in (("advantages_whitened", whitened), ("returns", returns))
        }
    )


@transformed(
    "The peer uses one lambda for advantages and another for returns. The test calls rlflow's `gae` once "
    "with each lambda",
    "nemo-gae-3",
)
def test_gae_with_two_lambdas(case):
    def at(name):
        return gae(rewards_of(case), case.inputs["values"], case.mask, gamma=1.0, lam=case.settings[name])

    advantages, returns = at("gae_lambda_policy")[0], at("gae_lambda_value")[1]
    case.agrees(advantages=advantages * case.mask, returns=returns * case.mask)


@transformed(
    "The peer's lambda also decays over tool tokens; rlflow skips tool tokens. The test includes the tool "
    "tokens in rlflow's mask, with reward and value 0",
    "orlhf-gae-2",
)
def test_gae_that_decays_over_tool_tokens(case):
    every = torch.ones_like(case.mask)
    advantages, returns = gae(
        case.inputs["token_level_rewards"] * case.mask,
        case.inputs["values"] * case.mask,
        every,
        **discounts(case),
    )
    case.agrees(advantages=advantages * case.mask, returns=returns * case.mask)


PAST = (
    "If a position follows a row's last token, the peer places the score there; rlflow places the score at "
    "the last token"
)


@transformed(
    {
        "trl-ppo-1": PAST,
        "trl-ppo-3": f"{PAST}. The peer also whitens the rewards without changing their mean",
    }
)
def test_gae_with_the_score_one_past_the_last_token(case):
    inputs, last = case.inputs, case.inputs["last_token_index"][:, None]
    places = torch.arange(inputs["values"].shape[1])
    mask, longer = places <= last, places <= last + 1
    charged = ppo.charge_kl(
        torch.zeros_like(inputs["scores"]),
        inputs["logprobs"],
        mask,
        inputs["ref_logprobs"],
        beta=case.settings["kl_coef"],
    )
    rewards = charged + place_last(inputs["scores"], longer)
    if case.settings["whiten_rewards"]:
        rewards = (whiten(rewards, longer) + rewards[longer].mean()) * longer
    advantages, returns = gae(rewards, inputs["values"], longer, **discounts(case))
    case.agrees(rewards=rewards, advantages=ppo.normalise(advantages, mask) * mask, returns=returns * longer)


@transformed(
    "The peer shifts the mask and the log-probs left by one position, and clips the scores. If a row fills "
    "the width of the batch, the peer adds the discounted last value to the last reward",
    "areal-adv-1",
)
def test_gae_of_a_bootstrapped_row(case):
    inputs, settings = case.inputs, case.settings
    mask = inputs["loss_mask"].roll(-1, 1).bool()
    mask[:, -1] = False
    scores = inputs["rewards"].float().clamp(-settings["reward_clip"], settings["reward_clip"])
    rewards = ppo.charge_kl(
        scores, inputs["logprobs"].roll(-1, 1), mask, inputs["ref_logp"], beta=settings["kl_ctl"]
    )
    full = inputs["attention_mask"].bool().all(1)
    ahead = place_last(torch.where(full, inputs["values"][:, -1], 0.0), mask)
    advantages, _ = gae(
        rewards + settings["discount"] * ahead,
        inputs["values"],
        mask,
        gamma=settings["discount"],
        lam=settings["gae_lambda"],
    )
    case.agrees(rolled_mask=mask.float(), tot_rewards=rewards, advantages=advantages * mask)


@pytest.mark.parametrize("name", ["verl-gae-3", "nemo-gae-1"])
def test_masked_values_reach_neither_gae_nor_its_gradient(name):
    """A NaN outside the mask reaches neither the advantages nor their gradient."""
    case = CASES[name]
    values = torch.where(case.mask, case.inputs["values"], torch.nan).requires_grad_()
    rewards = torch.where(case.mask, rewards_of(case), torch.nan)
    advantages, _ = gae(rewards, values, case.mask, gamma=1.0, lam=0.9)
    assert bool(advantages[case.mask].isfinite().all())
    gradient = torch.autograd.grad(advantages[case.mask].sum(), values)[0]
    assert bool(gradient[case.mask].isfinite().all())
    assert not gradient[~case.mask].any()
