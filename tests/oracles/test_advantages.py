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
    """bool [rows]: rows in groups of at least two rows."""
    return (case.group[:, None] == case.group).sum(1) > 1


def compared(case, advantages, **options):
    """Compare rlflow's advantages with the recorded advantages, and with the recorded returns if there are
    any: verl's estimators without a critic return the advantages a second time, as returns.
    """
    case.agrees(
        **{name: advantages * case.mask for name in ("advantages", "returns") if name in case.expected},
        **options,
    )


def adding(epsilon, scores, group):
    """Return (sd + 1e-4) / (sd + epsilon), [rows, 1]; sd is the standard deviation of each row's group."""
    return ((group_std(scores, group) + 1e-4) / (group_std(scores, group) + epsilon))[:, None]


ALONE = (
    "If a group has one response, the peer's advantage is the raw score and rlflow's is 0. The test "
    "compares only larger groups"
)


def divided(epsilon):
    """Return the reason of a case whose peer adds ``epsilon`` to the standard deviation."""
    return f"The peer adds {epsilon} to a group's standard deviation, rlflow adds 1e-4"


def grpo_of_verl(case):
    scores = scores_of(case)
    return compare(scores, case.group, case.mask, deviation=True) * adding(1e-6, scores, case.group)


@transformed(
    dict.fromkeys(("verl-grpo-1", "verl-grpo-3", "verl-grpo-vec"), f"{divided('1e-6')}. {ALONE}")
    | {"inv-grpo-perm": f"The peer of this case is verl. {divided('1e-6')}. {ALONE}"}
)
def test_grpo(case):
    compared(case, grpo_of_verl(case), where=several(case))
    assert not grpo_of_verl(case)[~several(case)].any()


@transformed(
    {
        "verl-rloo-1": (
            "If a group has one response, the peer's advantage is the raw score; rlflow's is NaN, which "
            "excludes the response from the update. The test compares only larger groups"
        ),
        "verl-rloo-2": (
            "If a group has one response, the peer's advantage is 0; rlflow's is NaN, which excludes the "
            "response from the update. The test compares only larger groups"
        ),
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
    "The peer multiplies advantages by rows / (rows with a nonzero score), rlflow by rows / (rows in groups "
    f"of unequal scores). {ALONE}",
    "verl-gpg-1",
)
def test_gpg(case):
    scores, groups = scores_of(case).tolist(), case.group.tolist()
    unequal = sum(
        any(other != score for other, its in zip(scores, groups, strict=True) if its == mine)
        for score, mine in zip(scores, groups, strict=True)
    )
    ours, theirs = len(scores) / unequal, len(scores) / sum(score != 0 for score in scores)
    assert ours != theirs  # otherwise the factor would be 1, and the test would not check it
    advantages, metrics = gpg.compare(scores_of(case), case.group, case.mask)
    assert float(metrics["alpha"]) == pytest.approx(ours, rel=1e-12)
    compared(case, advantages * theirs / ours, where=several(case))


@transformed(
    f"The peer whitens GRPO's advantages. {divided('1e-6')}. {ALONE.partition('. ')[0]}. The test adjusts "
    "rlflow's GRPO advantages to the peer's conventions, and then whitens them with rlflow's `whiten`",
    "verl-gdpo-1",
)
def test_grpo_whitened(case):
    scores = scores_of(case)
    raw = torch.where(several(case)[:, None], grpo_of_verl(case), scores[:, None] / (1 + 1e-6))
    compared(case, whiten(raw, case.mask))


@transformed(
    "The peer's k is the size of the group, so only the best response has an advantage. The test calls "
    "rlflow with k = 10, which rlflow lowers to the size of each group. The peer also divides by the "
    "group's standard deviation + 1e-6",
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


@transformed(
    "If a group has one response, the peer keeps the raw score; rlflow subtracts the group's mean, which "
    "leaves 0. The test replaces this 0 with the raw score, and then whitens",
    "verl-rfpp-baseline-1",
)
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
    "The peer clips the score of the sampled response minus the score of the greedy response; rlflow does "
    "not clip. The peer adds to each token only the token's own KL reward; rlflow also adds the KL rewards "
    "of later tokens",
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
    """Return (scores [rows], group [rows], mask [rows, 1]): each response counts as one token."""
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


@transformed(divided("1e-6"), "nemo-grpo-loo0-norm1")
def test_grpo_with_another_epsilon(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=True) * adding(1e-6, scores, group))


@transformed(divided("1e-8"), "oat-grpo")
def test_grpo_of_the_authors_of_dr_grpo(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=True) * adding(1e-8, scores, group))


@transformed(
    "The peer divides by the standard deviation of all scores in the batch + 1e-4; rlflow divides by the "
    "group's standard deviation + 1e-4",
    "trl-adv-3",
)
def test_grpo_with_the_deviation_of_the_batch(case):
    scores, group, mask = rows_of(case)
    row_compared(case, compare(scores, group, mask, deviation=False) / (scores.std() + 1e-4))


@transformed(
    "In groups of more than two responses, the peer divides a response's RLOO advantage by the standard "
    "deviation of the other responses' scores + 1e-6; rlflow does not divide",
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
    "The peer normalises each of several rewards in its group, adds them with weights, and normalises the "
    "sum over the batch. rlflow's GRPO stage normalises each reward, and the test computes the rest",
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


@transformed(
    "The peer clips the scores before it subtracts the KL penalty; rlflow does not clip scores",
    "trl-rloo-3",
)
def test_rloo_with_kl_in_the_score(case):
    scores, group, mask = rows_of(case)
    inputs = case.inputs
    clipped = scores.clamp(*case.settings["reward_clip_range"])
    charged = rloo.charge_kl(
        clipped, inputs["old_logps"], case.mask, inputs["ref_logps"], beta=case.settings["beta"]
    )
    row_compared(case, rloo.compare(charged, group, mask))


@transformed(
    "The peer subtracts from each token only this token's KL penalty; rlflow's REINFORCE++ also subtracts "
    "the penalties of later tokens. The peer whitens with the biased standard deviation, rlflow with the "
    "unbiased one",
    "nemo-rfpp-1",
)
def test_reinforce_pp_without_accumulation(case):
    scores, group, _ = rows_of(case)
    inputs = case.inputs
    charge = case.settings["kl_coef"] * kl(inputs["logprobs"], inputs["reference_logprobs"], "k1")
    white = whiten(reinforce_pp.centre(scores, group)[:, None] - charge, case.mask) * case.mask
    case.agrees(advantages=white * (case.mask.sum() / (case.mask.sum() - 1)).sqrt())
