"""Policy losses of tokens: PPO's clip, importance weights, CISPO, no ratio; and losses with a KL term."""

from pathlib import Path

import torch

from rlflow import kl, truncated_weights
from rlflow.algorithms import cispo, clip_cov, dapo, gpg, grpo, opo, ppo, sapo
from rlflow.author.load import load
from rlflow.training.objective import MinibatchTotals, New, row_weights, weighted_sum

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)


def columns_of(case):
    """Return the columns that a policy loss may read; weights are 1 if the case has none."""
    inputs = case.inputs
    old = inputs.get("old_log_prob", inputs.get("proximal_log_prob"))
    ones = torch.ones_like(inputs["log_prob"])
    return {
        "logprobs": old,
        "advantages": inputs["advantages"].reshape(len(ones), -1).expand_as(ones),
        "weights": ones,
        "mask": case.mask,
    }


def valued(loss, now, columns, **settings):
    """Call the loss with the new log-probs ``now`` and with the columns that it reads. Return its value
    without its metrics.
    """
    return loss(New(logprobs=now), *(columns.get(p.name) for p in loss.signature.columns), **settings)[0]


def ppo_of(case, now, columns):
    """Return PPO's loss; for verl's cases with the dual clip at 3, which is verl's default."""
    return valued(ppo.policy_loss, now, columns, clip=0.2, dual=3.0 if case.peer == "verl" else None)


def compared(case, now, total):
    case.agrees(loss=total, grad_log_prob=torch.autograd.grad(total, now)[0])


def now_of(case):
    return case.inputs["log_prob"].clone().requires_grad_()


PPO = {
    "verl-ppo-1": "tokens",
    "verl-ppo-7": "tokens",
    "verl-ppo-seq-mean-token-sum": 1.0,
    "orlhf-pl-1": "tokens",
    "orlhf-pl-3": "row-tokens",
    "areal-ppo-1": "tokens",
    "trl-loss-grpo": "row-tokens",
    "trl-loss-bnpo": "tokens",
    "trl-loss-dr_grpo": 10.0,
    "trl-loss-dapo": "tokens",
}


@as_is(*PPO)
def test_ppo(case):
    now = now_of(case)
    compared(case, now, averaged(ppo_of(case, now, columns_of(case)), case.mask, PPO[case.id]))


@as_is("slime-pl-1")
def test_ppo_per_token(case):
    moved = case.inputs["ppo_kl"].clone().requires_grad_()  # old - new
    value, _ = ppo.policy_loss(
        New(logprobs=-moved),
        torch.zeros_like(moved),
        case.inputs["advantages"],
        torch.ones_like(moved),
        clip=0.2,
        dual=None,
    )
    case.agrees(loss=value, grad_ppo_kl=torch.autograd.grad(value.sum(), moved)[0])


@transformed(
    "The peer clamps the log-ratio to [-20, 20]; rlflow does not clamp",
    "verl-ppo-3",
)
def test_dual_clip(case):
    now, columns = now_of(case), columns_of(case)
    near = columns["logprobs"] + (now - columns["logprobs"]).clamp(-20, 20)
    compared(case, now, averaged(ppo_of(case, near, columns), case.mask, "tokens"))


@transformed(
    "The peer multiplies the loss of each of four ranks by 4, because its engine averages over ranks; "
    "rlflow sums over ranks",
    "verl-ppo-5",
)
def test_ppo_on_one_rank_of_four(case):
    now, settings = now_of(case), case.settings
    weights = row_weights(
        case.mask.sum(1),
        "tokens",
        MinibatchTotals(settings["batch_num_tokens"], settings["global_batch_size"]),
    )
    value = ppo_of(case, now, columns_of(case))
    compared(case, now, settings["dp_size"] * weighted_sum(value, case.mask, weights, "tokens"))


@as_is("trl-loss-higher")
def test_dapo(case):
    now = now_of(case)
    compared(
        case,
        now,
        averaged(valued(dapo.policy_loss, now, columns_of(case), low=0.2, high=0.28), case.mask, "tokens"),
    )


@as_is("trl-loss-tis", "areal-dec-1")
def test_truncated_weights(case):
    now, columns = now_of(case), columns_of(case)
    if "is_ratio" in case.inputs:
        columns["weights"] = case.inputs["is_ratio"]
    else:
        columns["weights"] = truncated_weights(
            columns["logprobs"], case.inputs["behave_log_prob"], case.mask, cap=2.0
        )
        case.agrees(where=case.mask, behave_imp_weight=columns["weights"])
    compared(case, now, averaged(ppo_of(case, now, columns), case.mask, "tokens"))


@as_is("inv-microbatch-token-mean", "inv-microbatch-seq-mean-token-sum")
def test_the_parts_sum_up_to_the_full_loss(case):
    now, columns = now_of(case), columns_of(case)
    mean = {"token-mean": "tokens", "seq-mean-token-sum": 1.0}[case.settings["loss_agg_mode"]]
    value = ppo_of(case, now, columns)
    weights = row_weights(case.mask.sum(1), mean, MinibatchTotals.of(case.mask.sum(1)))
    parts = [
        weighted_sum(value[rows], case.mask[rows], weights[rows], mean)
        for rows in case.settings["split_rows"]
    ]
    whole = averaged(value, case.mask, mean)
    gradient = torch.autograd.grad(whole, now, retain_graph=True)[0]
    assert torch.equal(gradient, torch.autograd.grad(sum(parts), now)[0])
    case.agrees(loss_whole=whole, loss_parts=torch.stack(parts), grad_log_prob=gradient)


# -- CISPO
# ------------------------------------------------------------------------------------------------------------

DELTA = "The peer's setting is the largest ratio minus 1; rlflow's setting is the largest ratio"


@transformed(DELTA, "verl-cispo-1")
def test_cispo_by_its_distance_from_1(case):
    now, cap = now_of(case), 1 + case.settings["clip_ratio_high"]
    compared(
        case, now, averaged(valued(cispo.policy_loss, now, columns_of(case), cap=cap), case.mask, "tokens")
    )


@as_is("trl-loss-cispo")
def test_cispo(case):
    now, cap = now_of(case), case.settings["epsilon_high"]
    compared(
        case, now, averaged(valued(cispo.policy_loss, now, columns_of(case), cap=cap), case.mask, "tokens")
    )


@transformed(DELTA, "slime-cispo-1")
def test_cispo_per_token(case):
    now = now_of(case)
    value = valued(cispo.policy_loss, now, columns_of(case), cap=1 + case.settings["eps_clip_high"])
    case.agrees(loss=value, grad_log_prob=torch.autograd.grad(value.sum(), now)[0])


@transformed(
    f"{DELTA}. The peer also clamps small ratios to a lower bound; rlflow has no lower bound. The test "
    "lowers old log-probs so that these ratios equal the bound",
    "verl-cispo-3",
)
def test_cispo_with_a_lower_bound(case):
    now, columns, clip = now_of(case), columns_of(case), case.settings["clip_ratio"]
    columns["logprobs"] = torch.min(
        columns["logprobs"], now.detach() - torch.tensor(1 - clip, dtype=torch.float64).log()
    )
    compared(
        case, now, averaged(valued(cispo.policy_loss, now, columns, cap=1 + clip), case.mask, "row-tokens")
    )


# -- no ratio
# ------------------------------------------------------------------------------------------------------------


@as_is("verl-gpg-loss-1", "nemo-pg-7")
def test_no_ratio(case):
    now = now_of(case)
    compared(case, now, averaged(valued(gpg.policy_loss, now, columns_of(case)), case.mask, "tokens"))


@as_is("verl-reinforce-1")
def test_reinforce(case):
    now = now_of(case)
    compared(case, now, averaged(valued(opo.policy_loss, now, columns_of(case)), case.mask, 1.0))


# -- a KL term in the loss
# ---------------------------------------------------------------------------------------------------------

WEIGHTED = "The peer's KL term has the value of k3 and the gradient of k2"


def exchanged(case, now, beta):
    """Return beta times the mean of k3 - k2, a constant without a gradient. If the loss contains k2, adding
    this constant replaces the value of k2 with the value of k3.
    """
    new, reference = now.detach(), case.inputs["ref_log_prob"]
    return beta * averaged(kl(new, reference, "k3") - kl(new, reference, "k2"), case.mask, "tokens")


@transformed(
    f"{WEIGHTED}. The test uses k2 in rlflow's GRPO loss, and replaces its value with the value of k3",
    "nemo-pg-1",
    "nemo-pg-3",
)
def test_grpo_with_kl(case):
    now, columns, beta = now_of(case), columns_of(case), case.settings["reference_policy_kl_penalty"]
    columns["ref_logprobs"] = case.inputs["ref_log_prob"]
    if case.settings["use_importance_sampling_correction"]:
        cap = case.settings["truncated_importance_sampling_ratio"]
        columns["weights"] = truncated_weights(
            columns["logprobs"], case.inputs["rollout_log_prob"], case.mask, cap=cap
        )
    total = averaged(
        valued(grpo.policy_loss, now, columns, clip=0.2, beta=beta, estimator="k2"), case.mask, "tokens"
    )
    compared(case, now, total + exchanged(case, now, beta))


@as_is("trl-loss-kl")
def test_grpo_with_k3(case):
    now, columns = now_of(case), columns_of(case)
    columns["ref_logprobs"] = case.inputs["ref_log_prob"]
    value = valued(grpo.policy_loss, now, columns, clip=0.2, beta=case.settings["beta"], estimator="k3")
    compared(case, now, averaged(value, case.mask, "tokens"))


@transformed(
    f"{DELTA}. {WEIGHTED}. The test adds k2 to rlflow's CISPO loss, and replaces its value with the value of "
    "k3",
    "nemo-pg-5",
)
def test_cispo_with_kl(case):
    now, settings = now_of(case), case.settings
    beta = settings["reference_policy_kl_penalty"]
    value = valued(cispo.policy_loss, now, columns_of(case), cap=1 + settings["ratio_clip_max"])
    total = averaged(value + beta * kl(now, case.inputs["ref_log_prob"], "k2"), case.mask, "tokens")
    compared(case, now, total + exchanged(case, now, beta))


# -- tokens masked by their covariance
# ---------------------------------------------------------------------------------------------


def is_masked(case, columns, form, share, **band):
    """Return for each token whether Clip-Cov or KL-Cov selects it. There is no random choice: the cases of
    Clip-Cov allow more tokens than the band contains.
    """
    chance = torch.Generator().manual_seed(0)
    return clip_cov.hold(
        columns["logprobs"],
        columns["advantages"],
        case.mask,
        form=form,
        share=share,
        generator=chance,
        **band,
    )[0]


@as_is("verl-clipcov-1")
def test_clip_cov(case):
    now, columns, settings = now_of(case), columns_of(case), case.settings
    columns["held"] = is_masked(
        case,
        columns,
        "clip",
        settings["clip_cov_ratio"],
        low=settings["clip_cov_lb"],
        high=settings["clip_cov_ub"],
    )
    compared(
        case,
        now,
        averaged(
            valued(clip_cov.policy_loss, now, columns, form="clip", clip=0.2, beta=0.0), case.mask, "tokens"
        ),
    )


@transformed(
    "The peer selects tokens by the current log-probs, rlflow by the log-probs before the update",
    "verl-klcov-1",
)
def test_kl_cov(case):
    now, columns, settings = now_of(case), columns_of(case), case.settings
    columns["held"] = is_masked(
        case, columns | {"logprobs": now.detach()}, "kl", settings["kl_cov_ratio"], low=0.0, high=0.0
    )
    value = valued(clip_cov.policy_loss, now, columns, form="kl", clip=0.2, beta=settings["ppo_kl_coef"])
    compared(case, now, averaged(value, case.mask, "tokens"))


# -- a soft gate
# ------------------------------------------------------------------------------------------------------------


@as_is("verl-sapo-1", "areal-sapo-1", "trl-loss-sapo")
def test_sapo(case):
    now = now_of(case)
    mean = "tokens" if case.peer == "areal" else "row-tokens"
    compared(
        case,
        now,
        averaged(valued(sapo.policy_loss, now, columns_of(case), tau_pos=1.0, tau_neg=1.05), case.mask, mean),
    )


not_ours(
    "A loss that rlflow does not have: VESPO weights a response by a gamma density of its ratio",
    "trl-loss-vespo",
)
not_ours("A loss that rlflow does not have: DRO penalises the squared log-ratio", "verl-dro-1")
not_ours(
    "A loss that rlflow does not have: DPPO clips by a divergence instead of the ratio",
    "verl-dppo-tv-1",
    "verl-dppo-kl-1",
)
