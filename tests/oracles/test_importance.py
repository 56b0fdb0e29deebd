"""Weights between the sampling policy and the trained policy."""

from pathlib import Path

import torch

from rlflow import masked_weights, rejected_weights, truncated_weights
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
policy = load(Path(__file__).with_name("test_policy_loss.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)


def verl_weights(case, stage, **settings):
    """Return rlflow's weights for a case that records log-ratios, with 0 outside the mask as in verl."""
    log_ratio = case.inputs["log_ratio"]
    return stage(log_ratio, torch.zeros_like(log_ratio), case.mask, **settings) * case.mask


OUTSIDE = "Outside the mask, the peer's weights are 0 and rlflow's weights are 1"


@transformed(OUTSIDE, "verl-tis-token")
def test_truncated(case):
    case.agrees(weights=verl_weights(case, truncated_weights, cap=2.0))


@transformed(OUTSIDE, "verl-icepop")
def test_masked(case):
    case.agrees(weights=verl_weights(case, masked_weights, low=0.5, high=2.0))


@transformed(
    f"{OUTSIDE}. The peer also divides the weights by their mean over responses",
    "verl-tis-seq-norm",
)
def test_truncated_by_response(case):
    weights = verl_weights(case, truncated_weights, cap=2.0, ratio="sequence")
    case.agrees(weights=weights / weights.amax(1).mean())


TRL = {
    "trl-is-token_truncate-None": (truncated_weights, {"cap": 3.0}, "token"),
    "trl-is-token_mask-None": (masked_weights, {"low": 0.0, "high": 3.0}, "token"),
    "trl-is-sequence_truncate-None": (truncated_weights, {"cap": 3.0}, "sequence"),
    "trl-is-sequence_mask-None": (masked_weights, {"low": 0.0, "high": 3.0}, "sequence"),
}


def trl_weights(case):
    stage, settings, ratio = TRL[case.id]
    return stage(
        case.inputs["train_log_prob"], case.inputs["rollout_log_prob"], case.mask, ratio=ratio, **settings
    )


@as_is("trl-is-token_truncate-None", "trl-is-token_mask-None")
def test_weights_of_tokens(case):
    case.agrees(ratio=trl_weights(case))


@transformed(
    "The peer returns one weight per response; rlflow returns this weight at each token",
    "trl-is-sequence_truncate-None",
    "trl-is-sequence_mask-None",
)
def test_weights_of_responses(case):
    case.agrees(ratio=trl_weights(case)[:, :1])


BANDS = {
    "verl-rs-token_k1": {"low": 1 / 1.6, "high": 1 / 0.6, "ratio": "token"},
    "verl-rs-seq_mean_k1": {"low": 1 / 1.2, "high": 1 / 0.8, "ratio": "geometric"},
}


@transformed(
    "The peer returns a mask; rlflow returns weights, which are 0 for rejected tokens. The peer's bounds "
    "apply to the inverse of rlflow's ratio",
    *BANDS,
)
def test_rejected_responses(case):
    case.agrees(mask=(verl_weights(case, masked_weights, **BANDS[case.id]) != 0).double())


KINDS = {
    "verl-rs-token_k3": {"limit": 0.1, "estimator": "k3", "over": "token"},
    "verl-rs-seq_max_k2": {"limit": 0.2, "estimator": "k2", "over": "max"},
    "verl-rs-token_k1+seq_max_k3": {"limit": 0.5, "estimator": "k3", "over": "max"},
}


REJECTED = "The peer returns a mask; rlflow returns weights, which are 0 for rejected tokens"


@transformed(
    dict.fromkeys(KINDS, REJECTED)
    | {
        "verl-rs-token_k1+seq_max_k3": (
            f"{REJECTED}. The peer rejects a token if the inverse of rlflow's ratio is outside bounds, and a "
            "response if its largest KL estimate is above a limit. The test calls rlflow's `masked_weights` "
            "and `rejected_weights`"
        )
    }
)
def test_responses_rejected_by_kl(case):
    log_ratio = case.inputs["log_ratio"]
    columns = log_ratio, torch.zeros_like(log_ratio), case.mask
    weights = masked_weights(*columns, low=1 / 1.6, high=1 / 0.6) if "token_k1" in case.id else None
    case.agrees(mask=(rejected_weights(*columns, weights, **KINDS[case.id]) * case.mask != 0).double())


# -- in a loss
# ------------------------------------------------------------------------------------------------------------


def weighted(case, weights):
    now, columns = policy.now_of(case), policy.columns_of(case)
    columns["weights"] = weights
    policy.compared(case, now, averaged(policy.ppo_of(case, now, columns), case.mask, "tokens"))


@as_is("orlhf-pl-5")
def test_ppo_with_a_floor(case):
    inputs, (floor, cap) = case.inputs, case.settings["vllm_is_truncated_threshold"]
    weighted(
        case,
        truncated_weights(
            inputs["old_log_prob"], inputs["rollout_log_prob"], case.mask, cap=cap, floor=floor
        ),
    )


@as_is("areal-dec-3")
def test_ppo_with_the_geometric_mean_of_responses_in_a_band(case):
    inputs, band = case.inputs, case.settings["rejection_sampling"]
    columns = inputs["proximal_log_prob"], inputs["behave_log_prob"], case.mask
    weights = masked_weights(*columns, low=band["lower"], high=band["upper"], ratio="geometric")
    case.agrees(where=case.mask, behave_imp_weight=weights)
    weighted(case, weights)


@transformed(
    "The peer drops a response if the geometric mean of its importance ratios is outside a band. In the "
    "other responses, the weight of a token is the token's own ratio. The test combines rlflow's "
    "`masked_weights` and `truncated_weights`",
    "orlhf-pl-7",
)
def test_ppo_without_the_responses_outside_a_band(case):
    inputs, (low, high) = case.inputs, case.settings["vllm_is_truncated_threshold"]
    columns = inputs["old_log_prob"], inputs["rollout_log_prob"], case.mask
    kept = masked_weights(*columns, low=low, high=high, ratio="geometric") > 0
    weighted(case, truncated_weights(*columns, cap=torch.inf) * kept)


not_ours(
    "A rule that rlflow does not have: it drops a response if the advantage is negative and the policy has "
    "drifted too far from the sampler",
    "slime-opsm-1",
    "trl-opsm-1",
)
not_ours(
    "Logged metrics, which are not compared: they measure the drift between sampler and trainer",
    "verl-offpolicy-metrics",
)
not_ours(
    "An approximation that rlflow does not have: it estimates the log-probs of a policy between two weight "
    "versions",
    "areal-prox-1",
)
