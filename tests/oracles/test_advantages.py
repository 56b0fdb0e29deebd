"""Advantages from scores: within groups, against the greedy response, and returns over tokens."""

from pathlib import Path

import pytest
import torch

from rlflow import compare, group_std, kl, pass_at_k, place_last, reward_to_go, whiten
from rlflow.algorithms import gpg, opo, reinforce_pp, remax, rloo
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, not_ours = registry.as_is, registry.transformed, registry.not_ours


def scores_of(case):
    return (case.inputs["token_level_rewards"] * case.mask).sum(1)


def several(case):
    """bool [rows]: rows that are not alone in their group."""
    return (case.group[:, None] == case.group).sum(1) > 1


def compared(case, advantages, **options):
    """verl's estimators without a critic give the advantages a second time, as returns."""
    case.agrees(
        **{name: advantages * case.mask for name in ("advantages", "returns") if name in case.expected},
        **options,
    )


def adding(epsilon, scores, group):
    """The factor between a deviation + 1e-4, rlflow's, and a deviation + epsilon."""
    return ((group_std(scores, group) + 1e-4) / (group_std(scores, group) + epsilon))[:, None]


ALONE = "a response alone keeps its raw score there, and has advantage 0 here: left out"


def grpo_of_verl(case):
    scores = scores_of(case)
    return compare(scores, case.group, case.mask, deviation=True) * adding(1e-6, scores, case.group)


@transformed(
    f"1e-6 is added to the deviation there, 1e-4 here: multiplied by the quotient; {ALONE}",
    "verl-grpo-1",
    "verl-grpo-3",
    "verl-grpo-vec",
    "inv-grpo-perm",
)
def test_grpo(case):
    compared(case, grpo_of_verl(case), where=several(case))
    assert not grpo_of_verl(case)[~several(case)].any()


@transformed(
    {
        "verl-rloo-1": "a response alone keeps its raw score there, and is left out of the update here (NaN)",
        "verl-rloo-2": "a response alone has advantage 0 there, and is left out of the update here (NaN)",
    }
)
def test_rloo(case):
    advantages = rloo.compare(scores_of(case), case.group, case.mask)
    compared(case, advantages, where=several(case))
    assert bool(advantages[case.mask & ~several(case)[:, None]].isnan().all())


@transformed(ALONE, "verl-opo-1")
def test_opo(case):
    advantages = opo.compare(scores_of(case), case.group, case.mask)
    compared(case, advantages, where=several(case))
    assert not advantages[~several(case)].any()


@transformed(
    "alpha counts the rows of any score but 0 there, and those in groups of unequal scores here: "
    f"multiplied by the quotient of the two, both counted in the test; {ALONE}",
    "verl-gpg-1",
)
def test_gpg(case):
    scores, groups = scores_of(case).tolist(), case.group.tolist()
    unequal = sum(
        any(other != score for other, its in zip(scores, groups, strict=True) if its == mine)
        for score, mine in zip(scores, groups, strict=True)
    )
    ours, theirs = len(scores) / unequal, len(scores) / sum(score != 0 for score in scores)
    assert ours != theirs  # so that the quotient says something
    advantages, metrics = gpg.compare(scores_of(case), case.group, case.mask)
    assert float(metrics["alpha"]) == pytest.approx(ours, rel=1e-12)
    compared(case, advantages * theirs / ours, where=several(case))


@transformed(
    "GRPO's advantages, whitened: whitened in the test; 1e-6 is added to the deviation there; "
    f"{ALONE.partition(':')[0]}: put in its place before the whitening",
    "verl-gdpo-1",
)
def test_grpo_whitened(case):
    scores = scores_of(case)
    raw = torch.where(several(case)[:, None], grpo_of_verl(case), scores[:, None] / (1 + 1e-6))
    compared(case, whiten(raw, case.mask))


@transformed(
    "k is the size of the group there, so that the best response alone has an advantage, and it is divided "
    "by the group's deviation + 1e-6: divided in the test",
    "verl-passk-1",
)
def test_pass_at_k(case):
    gains = pass_at_k(scores_of(case), case.group, case.mask, k=10)
    compared(case, gains / (group_std(scores_of(case), case.group) + 1e-6)[:, None])


@as_is("verl-rfpp-1", "verl-rfpp-3")
def test_reinforce_pp(case):
    rewards = case.inputs["token_level_rewards"]
    returns = reward_to_go(rewards, case.mask, case.settings["gamma"])
    advantages = reinforce_pp.normalised_returns(rewards, case.mask, gamma=case.settings["gamma"])
    case.agrees(advantages=advantages * case.mask, returns=returns)


@transformed(f"{ALONE.partition(':')[0]}: put in its place before the whitening", "verl-rfpp-baseline-1")
def test_reinforce_pp_with_the_baseline(case):
    centred = torch.where(several(case), reinforce_pp.centre(scores_of(case), case.group), scores_of(case))
    rewards = reinforce_pp.charge_kl(
        centred, torch.zeros_like(case.inputs["token_level_rewards"]), case.mask, beta=0.0
    )
    compared(case, reinforce_pp.normalised_returns(rewards, case.mask, gamma=1.0))


@as_is("verl-remax-1")
def test_remax(case):
    rewards = case.inputs["token_level_rewards"]
    advantages = remax.compare(rewards, case.inputs["reward_baselines"], case.mask, gamma=1.0)
    case.agrees(advantages=advantages * case.mask, returns=reward_to_go(rewards, case.mask))


@transformed(
    "the difference of scores is clipped there, and each token bears its own KL alone: clipped before, and "
    "added after the difference",
    "remax-returns-1.0",
)
def test_remax_of_its_authors(case):
    inputs = case.inputs
    mask = case.mask & (torch.arange(case.mask.shape[1]) >= case.settings["prompt_len"] - 1)
    difference = inputs["score_minus_baseline"].clamp(-case.settings["clip"], case.settings["clip"])
    advantages = remax.compare(
        place_last(difference, mask), torch.zeros_like(difference), mask, gamma=case.settings["gamma"]
    )
    case.agrees(returns=advantages + inputs["kl_reward"] * mask)


@as_is("orlhf-ret-1")
def test_discounted_returns(case):
    case.agrees(returns=reward_to_go(case.inputs["token_level_rewards"], case.mask, case.settings["gamma"]))


# -- one advantage per response
# ----------------------------------------------------------------------------------------------------


def rows_of(case):
    """scores, group and a mask of one token per response."""
    found = next(
        case.inputs[name] for name in ("rewards", "token_rewards", "rewards_per_func") if name in case.inputs
    )
    scores = found.double().sum(1) if found.dim() == 2 else found.double()
    group = case.inputs["prompt_ids"][:, 0] if "prompt_ids" in case.inputs else torch.arange(len(scores)) // 4
    return scores, group, torch.ones(len(scores), 1, dtype=torch.bool)


def row_compared(case, advantages):
    case.agrees(advantages=advantages[:, 0].to(case.expected["advantages"].dtype))


@as_is("trl-adv-1")
def test_grpo_of_responses(case):
    row_compared(case, compare(*rows_of(case), deviation=True))


@transformed(
    {"nemo-grpo-loo0-norm1": "1e-6 is added to the deviation there, 1e-4 here: multiplied by the quotient"}
)
def test_grpo_with_another_epsilon(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=True) * adding(1e-6, scores, group))


@transformed("1e-8 is added to the deviation there, 1e-4 here: multiplied by the quotient", "oat-grpo")
def test_grpo_of_the_authors_of_dr_grpo(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=True) * adding(1e-8, scores, group))


@transformed("divided by the deviation of the whole batch there: divided in the test", "trl-adv-3")
def test_grpo_with_the_deviation_of_the_batch(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=False) / (scores.std() + 1e-4))


@transformed(
    "a leave-one-out deviation there, none in groups of two: the deviation of the others is taken row by "
    "row, with the row missing",
    "nemo-grpo-loo1-norm1",
)
def test_leave_one_out_with_a_deviation(case):
    scores, group, mask = rows_of(case)
    without = [
        group_std(torch.where(torch.arange(len(scores)) == i, torch.nan, scores), group)[i]
        for i in range(len(scores))
    ]
    deviation = torch.stack(without)
    row_compared(
        case, rloo.compare(scores, group, mask) / torch.where(deviation > 0, deviation + 1e-6, 1.0)[:, None]
    )


@transformed(
    "several rewards, normalised apart, summed and normalised over the batch: each by GRPO's stage, the "
    "rest in the test",
    "trl-adv-5",
)
def test_several_rewards(case):
    _, group, mask = rows_of(case)
    each = [
        compare(scores, group, mask, deviation=True)[:, 0].nan_to_num(0.0)
        for scores in case.inputs["rewards_per_func"].T
    ]
    total = sum(weight * x for weight, x in zip(case.settings["reward_weights"], each, strict=True))
    there = ~case.inputs["rewards_per_func"].isnan().all(1)
    inside = total[there]
    row_compared(case, torch.where(there, (total - inside.mean()) / (inside.std() + 1e-4), 0.0)[:, None])


@as_is("trl-rloo-1")
def test_rloo_of_responses(case):
    row_compared(case, rloo.compare(*rows_of(case)))


@transformed("scores are clipped there first: clipped in the test", "trl-rloo-3")
def test_rloo_with_kl_in_the_score(case):
    scores, group, mask = rows_of(case)
    inputs = case.inputs
    clipped = scores.clamp(*case.settings["reward_clip_range"])
    charged = rloo.charge_kl(
        clipped, inputs["old_logps"], case.mask, inputs["ref_logps"], beta=case.settings["beta"]
    )
    row_compared(case, rloo.compare(charged, group, mask))


@transformed(
    "each token bears its own KL alone there, and is whitened by a biased deviation; REINFORCE++ "
    "accumulates the KL of the "
    "tokens to come: its parts without the accumulation, multiplied by sqrt(n / (n - 1))",
    "nemo-rfpp-1",
)
def test_reinforce_pp_without_accumulation(case):
    scores, group, _ = rows_of(case)
    inputs = case.inputs
    charge = case.settings["kl_coef"] * kl(inputs["logprobs"], inputs["reference_logprobs"], "k1")
    white = whiten(reinforce_pp.centre(scores, group)[:, None] - charge, case.mask) * case.mask
    case.agrees(advantages=white * (case.mask.sum() / (case.mask.sum() - 1)).sqrt())
