"""PRIME: token rewards from a model that learns from outcomes. The cases contain beta times the log-ratio of
that model to the reference.
"""

from pathlib import Path

import torch

from rlflow import reward_to_go, row_mean
from rlflow.algorithms import prime
from rlflow.author.load import load
from rlflow.training.objective import New

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)


@transformed(
    "The peer multiplies the distance of a token's reward from its response's mean reward by n / (n - 1), "
    "where n is the number of responses per prompt; the paper and rlflow do not",
    "prime-rloo-1",
)
def test_process_and_outcome_rewards(case):
    process, scores = case.inputs["rm_scores"], (case.inputs["gt_scores"] * case.mask).sum(1)
    group = torch.arange(len(scores)) // case.settings["n_samples"]
    rewards = prime.reward_tokens(process, torch.zeros_like(process), scores, group, case.mask, beta=1.0)
    beyond = (process - row_mean(process, case.mask)[:, None]) / (case.settings["n_samples"] - 1)
    rewards = rewards + torch.where(case.mask, beyond, 0.0)
    advantages = prime.normalised_returns(rewards, case.mask, gamma=case.settings["reward_model_gamma"])
    case.agrees(advantages=advantages * case.mask, returns=reward_to_go(rewards, case.mask))


@as_is("prime-ce-1")
def test_the_loss_of_outcomes(case):
    now = case.inputs["token_level_scores"].clone().requires_grad_()
    value, _ = prime.outcome_loss(
        New(logprobs=now),
        torch.zeros_like(now),
        case.inputs["acc"],
        case.mask,
        beta=case.settings["beta"],
        correct=0.5,
    )
    loss = averaged(value, case.mask, "rows")
    case.agrees(loss=loss, grad_scores=torch.autograd.grad(loss, now)[0])


not_ours(
    "A logged metric, which is not compared: the share of pairs that are ranked correctly",
    "prime-acc-1",
)
