"""Losses of pairs: DPO, IPO, their online forms, and reward models."""

from pathlib import Path

import torch

from rlflow.algorithms import dpo, online_dpo, reward_model
from rlflow.author.load import load
from rlflow.training.objective import New

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)


def pairs(chosen, rejected):
    """Return the responses' log-probs as rows of one token, [rows, 1]; chosen and rejected rows alternate."""
    return torch.stack([chosen, rejected], 1).reshape(-1, 1)


def preferred(now, reference, **settings):
    mask = torch.ones_like(reference, dtype=torch.bool)
    value, _ = dpo.prefer(New(logprobs=now), reference, mask, **settings)
    return value, averaged(value, mask, "rows")


@as_is("orlhf-dpo-1", "orlhf-dpo-3")
def test_dpo(case):
    inputs, form = case.inputs, "ipo" if case.settings.get("ipo") else "sigmoid"
    now = pairs(inputs["policy_chosen"], inputs["policy_rejected"]).requires_grad_()
    _, loss = preferred(
        now, pairs(inputs["ref_chosen"], inputs["ref_rejected"]), beta=case.settings["beta"], form=form
    )
    gradient = torch.autograd.grad(loss, now)[0].reshape(-1, 2)
    case.agrees(loss=loss, grad_policy_chosen=gradient[:, 0], grad_policy_rejected=gradient[:, 1])


@transformed(
    "SPIN is DPO with the policy of the previous iteration as the reference. The test calls rlflow's DPO "
    "loss",
    "spin-sigmoid",
)
def test_spin(case):
    inputs = case.inputs
    now = pairs(inputs["policy_real"], inputs["policy_generated"]).requires_grad_()
    opponent = pairs(inputs["opponent_real"], inputs["opponent_generated"])
    value, loss = preferred(now, opponent, beta=case.settings["beta"], form="sigmoid")
    gradient = torch.autograd.grad(loss, now)[0].reshape(-1, 2)
    case.agrees(losses=value[::2], grad_policy_real=gradient[:, 0])


@as_is("orlhf-rm-1")
def test_the_pairwise_loss_of_a_reward_model(case):
    scores = torch.stack([case.inputs["chosen"], case.inputs["rejected"]], 1).reshape(-1)
    case.agrees(loss=reward_model.prefer(New(scores=scores), centre=0.0)[0].mean())


# TRL stores the first answers of all prompts, then the second answers; rlflow stores pairs adjacently
ORDER = torch.tensor([0, 2, 1, 3])


def chosen_first(case):
    """Return rlflow's signs [rows], and the row numbers in TRL's order, chosen and rejected alternating.

    Checks that TRL chose the same rows.
    """
    sign, _ = online_dpo.compare(case.inputs["rewards"][ORDER], torch.tensor([0, 0, 1, 1]))
    rows = [ORDER[[i, i + 1] if sign[i] > 0 else [i + 1, i]] for i in (0, 2)]
    case.agrees(
        chosen_indices=torch.stack([pair[0] for pair in rows]),
        rejected_indices=torch.stack([pair[1] for pair in rows]),
    )
    return sign, torch.cat(rows)


@as_is("trl-odpo-1")
def test_online_dpo(case):
    inputs = case.inputs
    sign, _ = chosen_first(case)
    now, mask = inputs["logprobs"][ORDER].clone().requires_grad_(), case.mask[ORDER]
    value, _ = online_dpo.prefer(
        New(logprobs=now), inputs["ref_logprobs"][ORDER], sign, mask, beta=case.settings["beta"]
    )
    loss = averaged(value, mask, "rows")
    case.agrees(loss=loss, grad_logprobs=torch.autograd.grad(loss, now)[0][ORDER])


@transformed(
    "The peer applies the IPO loss to newly sampled pairs; rlflow's `online_dpo` does not have this loss. "
    "The test builds the pairs with `online_dpo`, and applies the IPO loss of rlflow's `dpo`",
    "trl-odpo-3",
)
def test_online_ipo(case):
    inputs = case.inputs
    _, rows = chosen_first(case)
    now = inputs["logprobs"].clone().requires_grad_()
    value, _ = dpo.prefer(
        New(logprobs=now[rows]),
        inputs["ref_logprobs"][rows],
        case.mask[rows],
        beta=case.settings["beta"],
        form="ipo",
    )
    loss = averaged(value, case.mask[rows], "rows")
    case.agrees(loss=loss, grad_logprobs=torch.autograd.grad(loss, now)[0])
