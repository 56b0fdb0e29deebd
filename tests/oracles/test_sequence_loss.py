"""Policy losses with one ratio per response."""

from pathlib import Path

from rlflow import row_mean, truncated_weights
from rlflow.algorithms import gmpo, gspo
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
policy = load(Path(__file__).with_name("test_policy_loss.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)
CLIPS = {"verl-gspo-1": (3e-4, 4e-4), "verl-gspo-3": (0.2, 0.2), "trl-loss-gspo": (3e-4, 4e-4)}


def gspo_of(case, columns, low, high, mean):
    now = policy.now_of(case)
    value = policy.valued(gspo.policy_loss, now, columns, low=low, high=high)
    policy.compared(case, now, averaged(value, case.mask, mean))


@as_is(*CLIPS)
def test_gspo(case):
    gspo_of(case, policy.columns_of(case), *CLIPS[case.id], "row-tokens")


@transformed(
    "The peer multiplies the loss of a response by the response's length. The test sums rlflow's GSPO loss "
    "over the response's tokens",
    "trl-loss-luspo",
)
def test_gspo_times_the_length(case):
    gspo_of(case, policy.columns_of(case), case.settings["epsilon_low"], case.settings["epsilon_high"], 1.0)


@transformed(
    "The peer averages the advantages over a response's tokens, and weights the response by the geometric "
    "mean of its importance ratios. The test does the same before it calls rlflow's GSPO loss; rlflow's "
    "`truncated_weights` computes the weights",
    "areal-dec-5",
)
def test_gspo_with_sequence_weights(case):
    columns = policy.columns_of(case)
    columns["advantages"] = row_mean(columns["advantages"], case.mask)[:, None].expand_as(
        columns["advantages"]
    )
    cap = case.settings["rejection_sampling"]["upper"]
    columns["weights"] = truncated_weights(
        columns["logprobs"], case.inputs["behave_log_prob"], case.mask, cap=cap, ratio="geometric"
    )
    case.agrees(where=case.mask, behave_imp_weight=columns["weights"])
    gspo_of(case, columns, 0.2, 0.2, "tokens")


@as_is("verl-gmpo-1", "trl-gmpo-1", "trl-gmpo-3")
def test_gmpo(case):
    now, columns = policy.now_of(case), policy.columns_of(case)
    low, high = (
        case.settings.get(f"clip_ratio_{side}", case.settings.get(f"epsilon_{side}"))
        for side in ("low", "high")
    )
    value = policy.valued(gmpo.policy_loss, now, columns, low=low, high=high)
    policy.compared(case, now, averaged(value, case.mask, "rows"))


@transformed(
    "The peer returns the mean log-ratio of a response with the opposite sign, at each token; rlflow "
    "returns it once per response",
    "slime-gspo-1",
)
def test_the_log_ratio_of_a_response(case):
    log_ratio = row_mean(case.inputs["log_prob"] - case.inputs["old_log_prob"], case.mask)
    case.agrees(seq_kl=-log_ratio[:, None].expand_as(case.mask))
