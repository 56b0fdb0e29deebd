"""PPO's arithmetic against recorded results of other projects. Cases of other arithmetic are named with the reason, so that a new
case must be placed."""

from pathlib import Path

import pytest
import torch

from rlflow import kl, masked_mean, place_last, truncated_weights, whiten
from rlflow.algorithms import ppo
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
    "verl-ppo-3": "dual clip, and a clamp of the log-ratio",
    "verl-ppo-5": "one rank's share of a batch over four ranks",
    "verl-gspo-1": "ratio of sequences", "verl-gspo-3": "ratio of sequences", "slime-gspo-1": "ratio of sequences",
    "trl-loss-gspo": "ratio of sequences", "trl-loss-luspo": "ratio of sequences", "areal-dec-5": "ratio of sequences",
    "verl-gmpo-1": "geometric mean", "trl-gmpo-1": "geometric mean", "trl-gmpo-3": "geometric mean",
    "verl-cispo-1": "CISPO", "verl-cispo-3": "CISPO", "slime-cispo-1": "CISPO", "nemo-pg-5": "CISPO", "trl-loss-cispo": "CISPO",
    "verl-sapo-1": "SAPO", "areal-sapo-1": "SAPO", "trl-loss-sapo": "SAPO", "trl-loss-vespo": "VESPO",
    "verl-gpg-loss-1": "no ratio", "verl-reinforce-1": "no ratio", "nemo-pg-7": "no ratio", "verl-dro-1": "DRO",
    "verl-klcov-1": "chooses tokens by covariance", "verl-clipcov-1": "chooses tokens by covariance",
    "verl-dppo-tv-1": "clips by divergence", "verl-dppo-kl-1": "clips by divergence",
    "areal-dec-3": "drops sequences by their ratio", "orlhf-pl-7": "drops sequences by their ratio",
    "orlhf-pl-5": "importance weights have a lower bound too",
    "nemo-pg-1": "KL in the loss", "nemo-pg-3": "KL in the loss", "trl-loss-kl": "KL in the loss",
    "trl-loss-higher": "another clip upwards than downwards",
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
    advantages, returns = ppo.gae(rewards, inputs["values"], mask, gamma=gamma, lam=lam)
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
    clean, dirty = (ppo.gae(rewards.nan_to_num(0.0) if v is values else rewards, v, mask, gamma=1.0, lam=0.9) for v in (values, noisy))
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


def test_every_case_is_compared_or_has_its_reason():
    compared = {*GAE, *KL, *VALUE, *POLICY, "verl-whiten-1", "verl-whiten-3", "verl-whiten-5", "verl-maskedmean-nan", "slime-kl-unbiased",
                "verl-kl-reward", "orlhf-klrew-1", "areal-ppo-1", "slime-pl-1"}
    assert compared | set(OTHER) == set(CASES)
    assert not compared & set(OTHER)
