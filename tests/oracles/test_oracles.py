"""PPO's arithmetic against recorded results of other projects. Cases of other arithmetic are named with the reason, so that a new
case must be placed."""

from pathlib import Path

import pytest
import torch

from rlflow import gae, group_std, kl, masked_mean, place_last, reward_to_go, truncated_weights, whiten
from rlflow.algorithms import cispo, dapo, dpo, gpg, grpo, gspo, online_dpo, opo, ppo, reinforce_pp, remax, reward_model, rloo
from rlflow.author.load import load
from rlflow.training.objective import New, Totals, row_weights, weighted_sum

FOLDER = Path(__file__).parent
oracle_io = load(FOLDER / "oracle_io.py")
CASES = {case["id"]: case for case in oracle_io.load(FOLDER)}
OTHER = {
    "areal-adv-1": "bootstraps a row that is as long as the padded batch with its last value: depends on the other rows",
    "nemo-gae-3": "two lambdas, one for the critic and one for the policy",
    "orlhf-gae-2": "decays over tool tokens; the contract carries over them, as verl, NeMo-RL and AReaL do",
    "trl-ppo-1": "puts the score one past the last token",
    "trl-ppo-3": "puts the score one past the last token, and whitens rewards",
    "areal-norm-False": "biased variance, and epsilon added to the deviation",
    "orlhf-norm-1": "normalises each row",
    "verl-kl-k3+": "the value of k3 with the gradient of k2",
    "verl-kl-adaptive": "a controller, not an estimate",
    "nemo-kl-k1": "gradient of the expectation, by a weight of exp(logp - sg(logp))",
    "nemo-kl-k3": "gradient of the expectation, by a weight of exp(logp - sg(logp))",
    "orlhf-klrew-3": "a negative price counts as 0; PPO's setting refuses one",
    "verl-grpo-vec": "the same in float32: a group of equal rewards gets -0.003 where float64 gives 0",
    "verl-passk-1": "pass@k advantages", "verl-gdpo-1": "GRPO, then whitened over the batch",
    "trl-adv-5": "several rewards normalised apart",
    "trl-adv-3": "the deviation of the whole batch",
    "nemo-grpo-loo1-norm1": "a leave-one-out deviation", "prime-rloo-1": "PRIME", "prime-ce-1": "PRIME", "prime-acc-1": "PRIME",
    "nemo-rfpp-1": "each token bears its own KL alone; REINFORCE++ accumulates it over the tokens to come",
    "remax-returns-1.0": "each token bears its own KL alone, and the difference of scores is clipped",
    "spin-sigmoid": "SPIN", "trl-odpo-3": "IPO on fresh pairs",
    **dict.fromkeys(("orlhf-pipe-rloo", "orlhf-pipe-rb", "orlhf-pipe-drgrpo", "orlhf-pipe-group", "orlhf-pipe-reinforce", "orlhf-pipe-gae"),
                    "a whole pipeline: its parts are compared apart"),
    **dict.fromkeys(("verl-agg-token-sum-local", "verl-agg-token-sum-nanpad"), "a sum that grows with the batch"),
    "verl-agg-seq-mean-token-sum-norm-local": "divides by the width of the padding",
    "orlhf-stop-1": "scales the scores of truncated responses", "orlhf-stop-3": "scales the scores of truncated responses",
    "verl-cispo-3": "clips below as well", "slime-gspo-1": "the log-ratio alone, of the other sign",
    "verl-ppo-3": "dual clip, and a clamp of the log-ratio",
    "verl-ppo-5": "one rank's share of a batch over four ranks",

    "trl-loss-luspo": "ratio of sequences", "areal-dec-5": "ratio of sequences",
    "verl-gmpo-1": "geometric mean", "trl-gmpo-1": "geometric mean", "trl-gmpo-3": "geometric mean",
    "nemo-pg-5": "CISPO",
    "verl-sapo-1": "SAPO", "areal-sapo-1": "SAPO", "trl-loss-sapo": "SAPO", "trl-loss-vespo": "VESPO",
    "nemo-pg-7": "no ratio", "verl-dro-1": "DRO",
    "verl-klcov-1": "chooses tokens by covariance", "verl-clipcov-1": "chooses tokens by covariance",
    "verl-dppo-tv-1": "clips by divergence", "verl-dppo-kl-1": "clips by divergence",
    "areal-dec-3": "drops sequences by their ratio", "orlhf-pl-7": "drops sequences by their ratio",
    "orlhf-pl-5": "importance weights have a lower bound too",
    "nemo-pg-1": "KL in the loss", "nemo-pg-3": "KL in the loss", "trl-loss-kl": "KL in the loss",
}


def covered(table):
    return pytest.mark.parametrize("name", table)


def agrees(name, got):
    case = CASES[name]
    assert oracle_io.mismatch(got, {key: case["expected"][key] for key in got}, case["rtol"], case["atol"]) is None


GAE = {
    "verl-gae-1": ("advantages_raw", "advantages_whitened", "returns"), "verl-gae-3": ("advantages_raw", "advantages_whitened", "returns"),
    "verl-gae-5": ("advantages_raw", "advantages_whitened", "returns"), "slime-gae-1": ("advantages", "returns"),
    "orlhf-gae-1": ("advantages", "returns"), "nemo-gae-1": ("advantages_whitened", "returns"),
}


@covered(GAE)
def test_gae(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    mask = inputs.get("response_mask", inputs.get("mask", torch.ones_like(inputs["values"]))).bool()
    rewards = inputs["token_level_rewards"] if "token_level_rewards" in inputs else place_last(inputs["rewards"], mask)
    gamma, lam = settings.get("gamma", settings.get("gae_gamma")), settings.get("lam", settings.get("gae_lambda"))
    advantages, returns = gae(rewards, inputs["values"], mask, gamma=gamma, lam=lam)
    whitened = ppo.normalise(advantages, mask) * mask
    got = {"advantages": advantages * mask, "advantages_raw": advantages * mask, "advantages_whitened": whitened, "returns": returns * mask}
    if name == "nemo-gae-1":
        got["advantages"] = whitened
    every = settings.get("stride", 1)
    agrees(name, {key: got[key][:, ::every] for key in CASES[name]["expected"]})


@covered(["verl-gae-3", "nemo-gae-1"])
def test_what_stands_in_padding_and_at_holes_does_not_reach_gae(name):
    inputs = CASES[name]["inputs"]
    mask = inputs.get("response_mask", inputs.get("mask")).bool()
    values, noisy = inputs["values"], torch.where(mask, inputs["values"], torch.nan)
    rewards = torch.where(mask, torch.ones_like(values), torch.nan)
    clean, dirty = (gae(rewards.nan_to_num(0.0) if v is values else rewards, v, mask, gamma=1.0, lam=0.9) for v in (values, noisy))
    assert torch.equal(clean[0][mask], dirty[0][mask])
    assert torch.equal(clean[1][mask], dirty[1][mask])


@covered(["verl-whiten-1", "verl-whiten-3", "verl-whiten-5"])
def test_whiten(name):
    inputs = CASES[name]["inputs"]
    mask = inputs["mask"].bool()
    agrees(name, {"whitened": whiten(inputs["values"], mask) * mask})


@covered(["verl-maskedmean-nan"])
def test_masked_mean(name):
    inputs = CASES[name]["inputs"]
    agrees(name, {"mean": masked_mean(inputs["values"], inputs["mask"].bool())})


KL = {
    "verl-kl-k1": "k1", "verl-kl-k3": "k3", "verl-kl-low_var_kl": "k3", "slime-kl-k1": "k1", "slime-kl-k3": "k3",
    "orlhf-kl-k1": "k1", "orlhf-kl-k3": "k3",
}


@covered(KL)
def test_kl_where_the_others_do_not_clamp(name):
    case = CASES[name]
    logprobs, reference = case["inputs"]["logprob"].clone().requires_grad_(), case["inputs"]["ref_logprob"]
    value = kl(logprobs, reference, KL[name])
    free = case["expected"]["kl"].abs() < 10 if not name.startswith("slime") else torch.ones_like(value, dtype=torch.bool)
    assert int(free.sum()) > free.numel() // 2
    close = {"rtol": case["rtol"], "atol": case["atol"], "check_dtype": False}
    torch.testing.assert_close(value[free], case["expected"]["kl"][free], **close)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), logprobs)[0][free], case["expected"]["grad_logprob"][free], **close)


@covered(["slime-kl-unbiased"])
def test_kl_weighted_by_the_ratio(name):
    inputs = CASES[name]["inputs"]
    agrees(name, {"kl": inputs["importance_ratio"] * kl(inputs["logprob"], inputs["ref_logprob"], "k3")})


@covered(["verl-kl-reward", "orlhf-klrew-1"])
def test_the_kl_is_charged_in_the_reward(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    if name == "orlhf-klrew-1":
        mask = inputs["action_mask"].bool()
        agrees(name, {"rewards": place_last(inputs["r"], mask) - settings["kl_coef"] * inputs["kl"]})
    else:
        charge = settings["kl_ratio"] * kl(inputs["old_log_prob"], inputs["ref_log_prob"], "k1")
        agrees(name, {"rewards": inputs["token_level_scores"] - charge})


def averaged(value, mask, mean):
    counts = mask.sum(1)
    return weighted_sum(value, mask, row_weights(counts, mean, Totals.of(counts)), mean)


VALUE = {
    "verl-value-1": "tokens", "verl-value-3": "row-tokens", "verl-value-5": "tokens", "areal-value-mse": "tokens",
    "orlhf-value-1": "tokens", "orlhf-value-3": "row-tokens",
}


@covered(VALUE)
def test_value_loss(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    now, mask = inputs["vpreds"].clone().requires_grad_(), inputs["response_mask"].bool()
    clip = next(settings[key] for key in ("cliprange_value", "clip_eps", "value_eps_clip") if key in settings)
    value, _ = ppo.value_loss(New(values=now), inputs["values"], inputs["returns"], clip=clip)
    loss = averaged(value, mask, VALUE[name])
    agrees(name, {"loss": loss, "grad_vpreds": torch.autograd.grad(loss, now)[0]})


POLICY = {
    "verl-ppo-1": "tokens", "verl-ppo-7": "tokens", "verl-ppo-seq-mean-token-sum": 1.0, "areal-dec-1": "tokens", "orlhf-pl-1": "tokens",
    "orlhf-pl-3": "row-tokens", "trl-loss-grpo": "row-tokens", "trl-loss-bnpo": "tokens", "trl-loss-dr_grpo": 10.0,
    "trl-loss-dapo": "tokens", "trl-loss-tis": "tokens",
}


@covered(POLICY)
def test_policy_loss(name):
    inputs = CASES[name]["inputs"]
    now, old = inputs["log_prob"].clone().requires_grad_(), inputs.get("old_log_prob", inputs.get("proximal_log_prob"))
    mask = inputs.get("response_mask", inputs.get("loss_mask")).bool()
    advantages = inputs["advantages"].reshape(len(now), -1).expand_as(now)
    weights = inputs.get("is_ratio", torch.ones_like(now))
    if "behave_log_prob" in inputs:
        weights = truncated_weights(old, inputs["behave_log_prob"], mask, cap=2.0)
    value, _ = ppo.policy_loss(New(logprobs=now), old, advantages, weights, clip=0.2)
    loss = averaged(value, mask, POLICY[name])
    agrees(name, {"loss": loss, "grad_log_prob": torch.autograd.grad(loss, now)[0]})


@covered(["areal-ppo-1"])
def test_policy_loss_without_weights(name):
    inputs = CASES[name]["inputs"]
    now, mask = inputs["log_prob"].clone().requires_grad_(), inputs["loss_mask"].bool()
    value, _ = ppo.policy_loss(New(logprobs=now), inputs["proximal_log_prob"], inputs["advantages"], torch.ones_like(now), clip=0.2)
    loss = averaged(value, mask, "tokens")
    agrees(name, {"loss": loss, "grad_log_prob": torch.autograd.grad(loss, now)[0]})


@covered(["slime-pl-1"])
def test_policy_loss_per_token(name):
    inputs = CASES[name]["inputs"]
    moved = inputs["ppo_kl"].clone().requires_grad_()  # old - new
    value, metrics = ppo.policy_loss(New(logprobs=-moved), torch.zeros_like(moved), inputs["advantages"], torch.ones_like(moved), clip=0.2)
    agrees(name, {"loss": value, "grad_ppo_kl": torch.autograd.grad(value.sum(), moved)[0]})
    assert metrics["clipped"].shape == moved.shape


# -- advantages. Groups by name: their numbers in order of first appearance; scores are the sums of the tokens' rewards under the mask.


def grouped(name):
    """scores, group, mask of a case of verl's, and the rows that are not alone in their group: verl keeps the raw reward of those."""
    inputs = CASES[name]["inputs"]
    mask = inputs["response_mask"].bool()
    group = torch.tensor([sorted(set(inputs["index"])).index(each) for each in inputs["index"]])
    several = (group[:, None] == group).sum(1) > 1
    return (inputs["token_level_rewards"] * mask).sum(1), group, mask, several


def verl_grpo(scores, group, mask):  # verl adds 1e-6 to the deviation, rlflow 1e-4
    deviation = group_std(scores, group)
    return grpo.compare(scores, group, mask, deviation=True) * ((deviation + 1e-4) / (deviation + 1e-6))[:, None]


def verl_gpg(scores, group, mask):  # verl's alpha counts the rows of any score but 0, rlflow's those in groups of unequal scores
    advantage, metrics = gpg.compare(scores, group, mask)
    return advantage / metrics["alpha"] * len(scores) / (scores != 0).sum()


GROUPED = {
    "verl-grpo-1": verl_grpo, "verl-grpo-3": verl_grpo, "verl-rloo-1": rloo.compare, "verl-rloo-2": rloo.compare,
    "verl-opo-1": opo.compare, "verl-gpg-1": verl_gpg,
}


@covered(GROUPED)
def test_advantages_within_groups(name):
    scores, group, mask, several = grouped(name)
    case = CASES[name]
    got = GROUPED[name](scores, group, mask)
    rows = several
    assert oracle_io.mismatch(got[rows] * mask[rows], case["expected"]["advantages"][rows], case["rtol"], case["atol"]) is None


def test_reinforce_pp_advantages():
    for name in ("verl-rfpp-1", "verl-rfpp-3"):
        inputs = CASES[name]["inputs"]
        mask = inputs["response_mask"].bool()
        got = reinforce_pp.normalised_returns(inputs["token_level_rewards"], mask, gamma=CASES[name]["kwargs"]["gamma"])
        agrees(name, {"advantages": got * mask})


def test_reinforce_pp_baseline_advantages():
    scores, group, mask, several = grouped("verl-rfpp-baseline-1")
    centred = torch.where(several, reinforce_pp.centre(scores, group), scores)  # verl keeps the raw reward of a row alone
    rewards = reinforce_pp.charge_kl(centred, torch.zeros_like(mask, dtype=torch.float64), mask, beta=0.0)
    agrees("verl-rfpp-baseline-1", {"advantages": reinforce_pp.normalised_returns(rewards, mask, gamma=1.0) * mask})


def test_remax_advantages():
    inputs = CASES["verl-remax-1"]["inputs"]
    mask = inputs["response_mask"].bool()
    agrees("verl-remax-1", {"advantages": remax.compare(inputs["token_level_rewards"], inputs["reward_baselines"], mask, gamma=1.0) * mask})


def test_discounted_returns():
    case = CASES["orlhf-ret-1"]
    mask = case["inputs"]["response_mask"].bool()
    agrees("orlhf-ret-1", {"returns": reward_to_go(case["inputs"]["token_level_rewards"], mask, case["kwargs"]["gamma"])})


FOURS = {"trl-adv-1": True, "oat-grpo": True, "trl-rloo-1": None, "trl-rloo-3": None, "nemo-grpo-loo0-norm1": True}


ADDED = {"nemo-grpo-loo0-norm1": 1e-6, "oat-grpo": 1e-8}  # what they add to the deviation, where rlflow adds 1e-4


@covered(FOURS)
def test_advantages_of_groups_in_order(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    scores = inputs.get("rewards", inputs.get("token_rewards", inputs.get("rewards_per_func")))
    scores = (scores.sum(1) if scores.dim() == 2 else scores).double()
    group = inputs["prompt_ids"][:, 0] if "prompt_ids" in inputs else torch.arange(len(scores)) // 4
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    if settings.get("reward_clip_range"):  # a clip of scores is the reward function's business
        scores = scores.clamp(*settings["reward_clip_range"])
    if settings.get("beta"):
        scores = rloo.charge_kl(scores, inputs["old_logps"], inputs["completion_mask"].bool(), inputs["ref_logps"], beta=settings["beta"])
    got = rloo.compare(scores, group, mask) if FOURS[name] is None else grpo.compare(scores, group, mask, deviation=FOURS[name])
    if name in ADDED:
        got = got * ((group_std(scores, group) + 1e-4) / (group_std(scores, group) + ADDED[name]))[:, None]
    case = CASES[name]
    assert oracle_io.mismatch(got[:, 0], case["expected"]["advantages"].double(), max(case["rtol"], 1e-6), max(case["atol"], 1e-6)) is None


# -- losses of the other algorithms ------------------------------------------------------------------------------------------------


def graded(name, loss, mean, **settings):
    """A loss without weights between sampler and trainer, averaged, and its gradient."""
    inputs = CASES[name]["inputs"]
    now = inputs["log_prob"].clone().requires_grad_()
    mask = inputs["response_mask"].bool()
    columns = {"logprobs": inputs.get("old_log_prob"), "advantages": inputs["advantages"].reshape(len(now), -1).expand_as(now),
               "weights": torch.ones_like(now), "mask": mask}
    value, _ = loss(New(logprobs=now), *(columns[p.name] for p in loss.signature.columns), **settings)
    total = averaged(value, mask, mean)
    agrees(name, {"loss": total, "grad_log_prob": torch.autograd.grad(total, now)[0]})


LOSSES = {
    "verl-gspo-1": (gspo.policy_loss, "row-tokens", {"low": 3e-4, "high": 4e-4}),
    "verl-gspo-3": (gspo.policy_loss, "row-tokens", {"low": 0.2, "high": 0.2}),
    "trl-loss-gspo": (gspo.policy_loss, "row-tokens", {"low": 3e-4, "high": 4e-4}),
    "verl-cispo-1": (cispo.policy_loss, "tokens", {"cap": 1.28}),  # verl counts from 1, rlflow and TRL name the cap itself
    "trl-loss-cispo": (cispo.policy_loss, "tokens", {"cap": 5.0}),
    "trl-loss-higher": (dapo.policy_loss, "tokens", {"low": 0.2, "high": 0.28}),
    "verl-gpg-loss-1": (gpg.policy_loss, "tokens", {}),
    "verl-reinforce-1": (opo.policy_loss, 1.0, {}),
}


@covered(LOSSES)
def test_losses_of_the_other_algorithms(name):
    loss, mean, settings = LOSSES[name]
    graded(name, loss, mean, **settings)


def test_cispo_per_token():
    inputs = CASES["slime-cispo-1"]["inputs"]
    now = inputs["log_prob"].clone().requires_grad_()
    value, _ = cispo.policy_loss(New(logprobs=now), inputs["old_log_prob"], inputs["advantages"], torch.ones_like(now), cap=1.28)
    agrees("slime-cispo-1", {"loss": value, "grad_log_prob": torch.autograd.grad(value.sum(), now)[0]})


AGGREGATED = {
    "verl-agg-token-mean-local": "tokens", "verl-agg-seq-mean-token-sum-local": 1.0, "verl-agg-seq-mean-token-sum-norm-scale": 100.0,
    "orlhf-agg-1": "tokens",
}
WHOLE = {"verl-agg-seq-mean-token-mean-global": "row-tokens", "orlhf-agg-3": "row-tokens"}


@covered({**AGGREGATED, **WHOLE})
def test_aggregation(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    value, mask = inputs["loss_mat"].clone().requires_grad_(), inputs["loss_mask"].bool()
    if name in WHOLE:  # one share of two; peers multiply by the ranks because their engines average over them, rlflow's sums
        totals = Totals(int(settings.get("batch_num_tokens", 40)), int(settings["global_batch_size"]))
        loss = settings["dp_size"] * weighted_sum(value, mask, row_weights(mask.sum(1), WHOLE[name], totals), WHOLE[name])
    else:
        loss = averaged(value, mask, AGGREGATED[name])
    got = {"loss": loss, "grad_loss_mat": torch.autograd.grad(loss, value)[0]}
    agrees(name, {key: got[key] for key in CASES[name]["expected"]})


def test_the_parts_of_an_aggregate_sum_up_to_it():
    case = CASES["verl-agg-split"]
    value, mask = case["inputs"]["loss_mat"], case["inputs"]["loss_mask"].bool()
    totals = Totals.of(mask.sum(1))
    parts = [weighted_sum(value[i:i + 1], mask[i:i + 1], row_weights(mask[i:i + 1].sum(1), "tokens", totals), "tokens") for i in range(4)]
    agrees("verl-agg-split", {"whole": averaged(value, mask, "tokens"), "parts": torch.stack(parts)})


# -- shaping, dynamic sampling, pairs ----------------------------------------------------------------------------------------------


OVERLONG = ["verl-overlong-1", "verl-overlong-3", "areal-overlong-2", "orlhf-overlong-1"]


@covered(OVERLONG)
def test_over_long_shaping_up_to_the_longest_length(name):
    """Beyond max_tokens, where verl and AReaL go on, a response of `generate` cannot be."""
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    lengths, longest = inputs["response_lengths"], settings["max_response_length"]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    got = dapo.shorten(inputs["rewards"], mask, max_tokens=longest, overlong=settings["buffer_len"], penalty=settings["penalty_factor"])
    within = lengths <= longest
    assert within.any()
    torch.testing.assert_close(got[within], CASES[name]["expected"]["rewards"][within], check_dtype=False)


def test_mixed_groups_are_kept():
    scores = CASES["std-filter-1"]["inputs"]["group_rewards"]
    group = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
    keep = dapo.mixed(scores.reshape(-1), group).reshape(scores.shape)[:, 0]
    agrees("std-filter-1", {"keep_by_std64_gt_1e6": keep})


@covered(["orlhf-dpo-1", "orlhf-dpo-3"])
def test_dpo(name):
    inputs, settings = CASES[name]["inputs"], CASES[name]["kwargs"]
    now = torch.stack([inputs["policy_chosen"], inputs["policy_rejected"]], 1).reshape(-1, 1).requires_grad_()
    reference = torch.stack([inputs["ref_chosen"], inputs["ref_rejected"]], 1).reshape(-1, 1)
    mask = torch.ones_like(reference, dtype=torch.bool)
    form = "ipo" if settings.get("ipo") else "sigmoid"
    value, _ = dpo.prefer(New(logprobs=now), reference, mask, beta=settings["beta"], form=form)
    loss = averaged(value, mask, "rows")
    gradient = torch.autograd.grad(loss, now)[0].reshape(-1, 2)
    agrees(name, {"loss": loss, "grad_policy_chosen": gradient[:, 0], "grad_policy_rejected": gradient[:, 1]})


def test_the_pairwise_loss_of_a_reward_model():
    inputs = CASES["orlhf-rm-1"]["inputs"]
    scores = torch.stack([inputs["chosen"], inputs["rejected"]], 1).reshape(-1)
    agrees("orlhf-rm-1", {"loss": reward_model.prefer(New(scores=scores), centre=0.0)[0].mean()})


def test_online_dpo():
    inputs, settings = CASES["trl-odpo-1"]["inputs"], CASES["trl-odpo-1"]["kwargs"]
    order = torch.tensor([0, 2, 1, 3])  # TRL has the first answers of all prompts, then the second ones; rlflow has pairs adjacent
    now, mask = inputs["logprobs"][order].clone().requires_grad_(), inputs["completion_mask"][order].bool()
    sign, _ = online_dpo.compare(inputs["rewards"][order], torch.tensor([0, 0, 1, 1]))
    value, _ = online_dpo.prefer(New(logprobs=now), inputs["ref_logprobs"][order], sign, mask, beta=settings["beta"])
    loss = averaged(value, mask, "rows")
    agrees("trl-odpo-1", {"loss": loss, "grad_logprobs": torch.autograd.grad(loss, now)[0][order]})


def test_every_case_is_compared_or_has_its_reason():
    compared = {*GAE, *KL, *VALUE, *POLICY, "verl-whiten-1", "verl-whiten-3", "verl-whiten-5", "verl-maskedmean-nan", "slime-kl-unbiased",
                "verl-kl-reward", "orlhf-klrew-1", "areal-ppo-1", "slime-pl-1"}
    compared |= {*GROUPED, *FOURS, *LOSSES, *AGGREGATED, *WHOLE, *OVERLONG, "verl-rfpp-1", "verl-rfpp-3", "verl-rfpp-baseline-1",
                 "verl-remax-1",
                 "orlhf-ret-1", "slime-cispo-1", "verl-agg-split", "std-filter-1", "orlhf-dpo-1", "orlhf-dpo-3", "orlhf-rm-1", "trl-odpo-1"}
    assert compared | set(OTHER) == set(CASES)
    assert not compared & set(OTHER)
