"""Expected gradients against true ones, by enumeration.

Two tokens of a vocabulary of three: each of the 9 responses and each of the 9^n groups counts with its
probability. Nothing is sampled, so any difference is bias.
"""

import itertools
import math
import statistics

import pytest
import torch

from rlflow import compare, gae, kl, pass_at_k, place_last, row, truncated_weights
from rlflow.algorithms import (
    cispo,
    clip_cov,
    correction,
    cppo,
    critique,
    dapo,
    debate,
    distill,
    gdpo,
    gmpo,
    gpg,
    grpo,
    gspo,
    opo,
    ppo,
    ppo_turns,
    prime,
    raft,
    reinforce_pp,
    remax,
    rloo,
    sapo,
    selfplay,
    spo,
    topr,
    vapo,
    vineppo,
)
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.joint import JointLoss
from rlflow.author.node_options import ChooseOptions
from rlflow.execution.lineage import chosen_rows
from rlflow.training.learning import OptimizerStep, Passes, learn
from rlflow.training.objective import New, weighted_sum
from rlflow.training.peers import Peers

RESPONSES = torch.tensor(list(itertools.product(range(3), repeat=2)))
SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.0, 1.1, -0.7, 0.9, 0.4], dtype=torch.float64)
BINARY = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Policy:
    """Logits of the first token [3] and of the second after each first [3, 3]: 12 parameters."""

    def __init__(self, seed):
        self.logits = torch.randn(
            4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        ).requires_grad_()

    def logprobs(self, responses=RESPONSES):
        """[rows, 2]"""
        table, first, second = self.logits.log_softmax(-1), responses[:, 0], responses[:, 1]
        return torch.stack([table[0, first], table[1 + first, second]], 1)

    def probabilities(self):
        return self.logprobs().sum(1).exp()

    def gradient(self, objective):
        return torch.autograd.grad(objective, self.logits)[0]

    def true_gradient(self, scores):
        """Return the gradient of the expected score."""
        return self.gradient((self.probabilities() * scores).sum())


@pytest.fixture
def policy():
    return Policy(0)


@pytest.fixture
def reference():
    return Policy(1)


LOSSES = {
    "ppo": (ppo.policy_loss, {"clip": 0.2, "dual": 3.0}),
    "grpo": (grpo.policy_loss, {"clip": 0.2, "beta": 0.0}),
    "rloo": (rloo.policy_loss, {"clip": 0.2}),
    "remax": (remax.policy_loss, {"clip": 0.2}),
    "reinforce_pp": (reinforce_pp.policy_loss, {"clip": 0.2}),
    "dapo": (dapo.policy_loss, {"low": 0.2, "high": 0.28}),
    "distill": (distill.policy_loss, {"clip": 0.2}),
    "cispo": (cispo.policy_loss, {"cap": 5.0}),
    "prime": (prime.policy_loss, {"clip": 0.2}),
    "clip_cov": (clip_cov.policy_loss, {"form": "clip", "clip": 0.2, "beta": 0.0}),
    "kl_cov": (clip_cov.policy_loss, {"form": "kl", "clip": 0.2, "beta": 1.0}),
    "vapo": (vapo.policy_loss, {"low": 0.2, "high": 0.28}),
    "gspo": (gspo.policy_loss, {"low": 3e-4, "high": 4e-4}),
    "gpg": (gpg.policy_loss, {}),
    "opo": (opo.policy_loss, {}),
    "cppo": (cppo.policy_loss, {"clip": 0.2}),
    "gdpo": (gdpo.policy_loss, {"clip": 0.2}),
    "correction": (correction.policy_loss, {"clip": 0.2, "beta": 0.0}),
    "vineppo": (vineppo.policy_loss, {"clip": 0.2, "beta": 0.0}),
    "sapo": (sapo.policy_loss, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "topr": (topr.policy_loss, {}),
    "selfplay": (selfplay.policy_loss, {"clip": 0.2}),
    "spo": (spo.policy_loss, {"low": 0.2, "high": 0.28}),
    "critique": (critique.policy_loss, {"clip": 0.2}),
    "debate": (debate.policy_loss, {"clip": 0.2}),
}


def expected(policy, advantages, of, chance, name="opo", weights=None):
    """Return the gradient that an update ascends: responses ``of`` [rows], each with its probability
    ``chance``; the sum over a response's tokens.
    """
    now = policy.logprobs(RESPONSES[of])
    mask = torch.ones_like(now, dtype=torch.bool)
    loss, settings = LOSSES[name]
    given = {
        "logprobs": now.detach(),
        "sampled_logprobs": now.detach(),
        "advantages": advantages,
        "mask": mask,
        "held": ~mask,
        "weights": torch.ones_like(now) if weights is None else weights,
    }
    value, _ = loss(New(logprobs=now), *(given.get(p.name) for p in loss.signature.columns), **settings)
    return -policy.gradient(weighted_sum(value, mask, chance, 1.0))


ALONE = torch.arange(9)
ONES = torch.ones(9, 2, dtype=torch.bool)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_equal_reinforce_before_the_policy_moves(policy, name):
    chance = policy.probabilities().detach()
    got = expected(policy, SCORES[:, None].expand(9, 2), ALONE, chance, name)
    torch.testing.assert_close(got, policy.true_gradient(SCORES), **EXACT)


def test_gmpo_is_reinforce_divided_by_the_length(policy):
    """Its loss is per response, so the gradient of a token is divided by the response's number of tokens,
    two.
    """
    now, scores = policy.logprobs(), SCORES[:, None].expand(9, 2)
    value, _ = gmpo.policy_loss(
        New(logprobs=now), now.detach(), scores, torch.ones_like(scores), ONES, low=0.4, high=0.4
    )
    got = -policy.gradient(weighted_sum(value, ONES, policy.probabilities().detach(), "rows"))
    torch.testing.assert_close(got, policy.true_gradient(SCORES) / 2, **EXACT)


def test_reinforce_pp_is_unbiased_before_whitening(policy, reference):
    """The KL of a token and of the tokens after it gives the gradient of E[score] - beta KL(policy,
    reference), over full responses.
    """
    charged = reinforce_pp.charge_kl(
        SCORES, policy.logprobs().detach(), ONES, reference.logprobs().detach(), beta=0.3
    )
    returns = reinforce_pp.reward_to_go(charged, ONES)
    got = expected(policy, returns, ALONE, policy.probabilities().detach(), "reinforce_pp")
    torch.testing.assert_close(got, penalised(policy, reference, 0.3), **EXACT)


def test_spo_with_any_value_has_the_true_direction(policy):
    advantages = spo.compare(SCORES, torch.full((9,), 0.7, dtype=torch.float64), ONES)
    got = expected(policy, advantages, ALONE, policy.probabilities().detach(), "spo")
    torch.testing.assert_close(got * (SCORES.var() + 1e-8).sqrt(), policy.true_gradient(SCORES), **EXACT)


def test_selfplay_has_the_true_direction_for_each_kind(policy):
    kind, nothing = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.float64)
    advantages = selfplay.compare(SCORES, kind, ONES, nothing, nothing, nothing, decay=0.9)[0]
    got = expected(policy, advantages, ALONE, policy.probabilities().detach(), "selfplay")
    deviation = SCORES.std(correction=0) + 1e-4
    torch.testing.assert_close(got * deviation, policy.true_gradient(SCORES), **EXACT)


def penalised(policy, reference, beta):
    """Return the gradient of E[score] - beta KL(policy, reference)."""
    log_ratio = (policy.logprobs() - reference.logprobs().detach()).sum(1)
    return policy.gradient((policy.probabilities() * (SCORES - beta * log_ratio)).sum())


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (1.0, 0.0)])
def test_ppo_with_the_true_values_is_unbiased_at_any_lambda(policy, gamma, lam):
    chance, mean = policy.probabilities().detach(), (policy.probabilities() * SCORES).sum().detach()
    after = (policy.logprobs()[:, 1].exp() * SCORES).detach().reshape(3, 3).sum(1)  # for each first token
    values = torch.stack([mean.expand(9), after[RESPONSES[:, 0]]], 1)
    advantages, returns = gae(place_last(SCORES, ONES), values, ONES, gamma=gamma, lam=lam)
    torch.testing.assert_close(
        expected(policy, advantages, ALONE, chance, "ppo"), policy.true_gradient(SCORES), **EXACT
    )
    torch.testing.assert_close((chance * returns[:, 0]).sum(), mean, **EXACT)


def test_ppo_with_any_values_is_unbiased_at_lambda_1(policy, reference):
    values = torch.tensor([0.7, -3.0, 11.0, 2.0], dtype=torch.float64)[
        torch.stack([0 * ALONE, 1 + RESPONSES[:, 0]], 1)
    ]
    rewards = ppo.charge_kl(SCORES, policy.logprobs().detach(), ONES, reference.logprobs().detach(), beta=0.3)
    advantages, _ = gae(rewards, values, ONES, gamma=1.0, lam=1.0)
    got = expected(policy, advantages, ALONE, policy.probabilities().detach(), "ppo")
    torch.testing.assert_close(got, penalised(policy, reference, 0.3), **EXACT)


@pytest.mark.parametrize("lam", [1.0, 0.6, 0.0])
def test_ppo_turns_is_unbiased_and_credits_only_later_rewards(policy, lam):
    """Two turns of one token: the first turn earns 2 for a token 1 and -1 for a token 2; the score comes on
    top.
    """
    chance, first = (
        policy.probabilities().detach(),
        torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64)[RESPONSES[:, 0]],
    )
    mean, left = (chance * SCORES).sum(), SCORES - first
    # the remaining reward of the second turn
    after = (policy.logprobs()[:, 1].exp() * left).detach().reshape(3, 3).sum(1)
    values = torch.stack([mean.expand(9), after[RESPONSES[:, 0]]], 1)
    earned = torch.stack([first, torch.zeros(9, dtype=torch.float64)], 1)
    rewards = ppo_turns.credit_turns(SCORES, policy.logprobs().detach(), ONES, earned, beta=0.3)
    torch.testing.assert_close(rewards, torch.stack([first, left], 1), **EXACT)
    advantages, returns = gae(rewards, values, ONES, gamma=1.0, lam=lam)
    torch.testing.assert_close(returns[:, 1], left, **EXACT)
    torch.testing.assert_close(
        expected(policy, advantages, ALONE, chance, "ppo"), policy.true_gradient(SCORES), **EXACT
    )


def test_ppo_turns_rewards_the_end_of_a_turn_and_otherwise_equals_ppo(policy, reference):
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, True, False]])
    earned = torch.tensor([[0.0, -0.25, 0.0, 0.0, 1.0], [-0.25, 0.0, 0.0, -0.25, 0.0]])
    scores, none = torch.tensor([0.75, 0.5]), torch.zeros(2, 5)
    rewards = ppo_turns.credit_turns(scores, none, mask, earned, beta=0.0)
    # the score adds 1 to the second row's reward
    assert rewards.tolist() == [[0.0, -0.25, 0.0, 0.0, 1.0], [-0.25, 0.0, 0.0, 0.75, 0.0]]
    now, then = policy.logprobs().detach(), reference.logprobs().detach()
    alone = ppo_turns.credit_turns(SCORES, now, ONES, ref_logprobs=then, beta=0.3)
    assert torch.equal(alone, ppo.charge_kl(SCORES, now, ONES, then, beta=0.3))


def test_vapo_is_unbiased_and_its_critic_learns_full_returns(policy):
    """Two tokens and an alpha of 2: lambda is 0.75, computed by hand. Lambda is never below 0."""
    chance, mean = policy.probabilities().detach(), (policy.probabilities() * SCORES).sum().detach()
    after = (policy.logprobs()[:, 1].exp() * SCORES).detach().reshape(3, 3).sum(1)  # for each first token
    values = torch.stack([mean.expand(9), after[RESPONSES[:, 0]]], 1)
    advantages, returns, _ = vapo.decoupled_gae(SCORES, values, ONES, alpha=2.0)
    torch.testing.assert_close(
        advantages[:, 0], values[:, 1] - values[:, 0] + 0.75 * (SCORES - values[:, 1]), **EXACT
    )
    torch.testing.assert_close(returns, SCORES[:, None].expand(9, 2), **EXACT)
    torch.testing.assert_close(
        expected(policy, advantages, ALONE, chance, "vapo"), policy.true_gradient(SCORES), **EXACT
    )
    short, _, _ = vapo.decoupled_gae(SCORES, values, ONES, alpha=0.05)
    torch.testing.assert_close(short[:, 0], values[:, 1] - values[:, 0], **EXACT)


class Tabular:
    """A model with a policy's log-probs of the responses. It keeps the gradient of its single step."""

    device, peers = torch.device("cpu"), Peers()

    def __init__(self, policy):
        self.policy = policy

    def compute(self, rows, want):
        return New(logprobs=self.policy.logprobs(rows["tokens"]))

    def backward(self, objective):
        self.gradient = self.policy.gradient(objective)

    def step(self):
        return OptimizerStep(True, 0.0, 0.0)


def test_vapo_averages_each_loss_over_its_own_tokens(policy):
    """The policy's loss averages over all tokens, the likelihood over tokens of right responses; the gradient
    of plain sums by hand.
    """
    now, right = policy.logprobs(), vapo.is_right(SCORES, correct=0.45)
    lengths = torch.full((9,), 2)
    token = {
        "mask": ONES,
        "logprobs": now.detach(),
        "advantages": SCORES[:, None].expand(9, 2),
        "weights": torch.ones_like(now),
    }
    data = {
        name: Data(Kind(Level.TOKEN, str(value.dtype).removeprefix("torch.")), value.flatten(), lengths)
        for name, value in (token | {"tokens": RESPONSES}).items()
    }
    asked = Data(
        Kind(Level.PROMPT, "int64"), torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.int64)
    )
    batch = Batch(Axis.fresh(9), data | {"right": Data(row("bool"), right), "prompt_tokens": asked})
    learner = Tabular(policy)
    both = JointLoss((vapo.policy_loss, vapo.likelihood), (1.0, 0.1), (None, "right"))
    learn(learner, batch, both, {"low": 0.2, "high": 0.28}, Passes(mean=("tokens", "tokens")))
    want = (SCORES[:, None] * now).sum() / 18 + 0.1 * now[right].sum() / (2 * right.sum())
    torch.testing.assert_close(-learner.gradient, policy.gradient(want), **EXACT)


def test_remax_is_unbiased_with_the_kl_in_its_reward(policy, reference):
    greedy = torch.full((9,), float(SCORES[policy.probabilities().argmax()]), dtype=torch.float64)
    rewards = remax.charge_kl(
        SCORES, policy.logprobs().detach(), ONES, reference.logprobs().detach(), beta=0.3
    )
    got = expected(
        policy,
        remax.compare(rewards, greedy, ONES, gamma=1.0),
        ALONE,
        policy.probabilities().detach(),
        "remax",
    )
    torch.testing.assert_close(got, penalised(policy, reference, 0.3), **EXACT)


# -- groups
# ------------------------------------------------------------------------------------------------------------


def groups(policy, samples):
    """Return every group of ``samples`` responses: the response of each row, its group, and its share of the
    group's probability.
    """
    of = torch.tensor(list(itertools.product(range(9), repeat=samples)))
    chance = policy.probabilities().detach()[of].prod(1)
    return (
        of.flatten(),
        torch.arange(len(of)).repeat_interleave(samples),
        chance.repeat_interleave(samples) / samples,
    )


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_is_unbiased(policy, reference, samples, beta):
    of, group, chance = groups(policy, samples)
    mask, now = torch.ones(len(of), 2, dtype=torch.bool), policy.logprobs(RESPONSES[of]).detach()
    scores = rloo.charge_kl(SCORES[of], now, mask, reference.logprobs(RESPONSES[of]).detach(), beta=beta)
    got = expected(policy, rloo.compare(scores, group, mask), of, chance, "rloo")
    torch.testing.assert_close(got, penalised(policy, reference, beta), **EXACT)


COMPARED = {
    "grpo": lambda *columns: compare(*columns, deviation=False),
    "opo": opo.compare,
    "gpg": lambda *columns: gpg.compare(*columns)[0],
}


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("name", COMPARED)
def test_a_mean_that_includes_the_row_only_shrinks_the_gradient(policy, name, samples):
    """The factor is (n - 1) / n, since the mean includes the row.

    With equal lengths OPO has the same mean. GPG's alpha scales the gradient up by all groups over groups
    with unequal scores: 9 of the 9^n groups consist of one response n times.
    """
    of, group, chance = groups(policy, samples)
    advantages = COMPARED[name](SCORES[of], group, torch.ones(len(of), 2, dtype=torch.bool))
    got = expected(policy, advantages, of, chance, name)
    alpha = 9**samples / (9**samples - 9) if name == "gpg" else 1.0
    torch.testing.assert_close(got, alpha * (samples - 1) / samples * policy.true_gradient(SCORES), **EXACT)


def difficulty(p, n):
    """Return GRPO's weight of a question's gradient if the division by the deviation is on and the answer is
    right with probability p.

    It is the mean over the number of right answers k ~ Binomial(n, p) of k (n - k) / n² / (deviation + 1e-4)
    / (p (1 - p)).
    """
    total = 0.0
    for k in range(1, n):
        deviation = math.sqrt(k * (n - k) / (n * (n - 1)))
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k) * k * (n - k) / n**2 / (deviation + 1e-4)
    return total / (p * (1 - p))


@pytest.mark.parametrize("samples", [2, 3])
def test_the_deviation_weighs_questions_by_the_mix_of_their_answers(policy, samples):
    """The known bias of GRPO (Liu et al. 2025): for scores of 0 and 1 the direction is right, with a weight
    that depends on the question.
    """
    of, group, chance = groups(policy, samples)
    advantages = compare(BINARY[of], group, torch.ones(len(of), 2, dtype=torch.bool), deviation=True)
    p = float((policy.probabilities() * BINARY).sum().detach())
    got = expected(policy, advantages, of, chance, "grpo")
    torch.testing.assert_close(got, difficulty(p, samples) * policy.true_gradient(BINARY), **EXACT)
    assert difficulty(0.02, 8) > 1.3 * difficulty(0.5, 8)


def test_the_deviation_changes_the_direction_for_other_scores(policy):
    of, group, chance = groups(policy, 2)
    advantages = compare(SCORES[of], group, torch.ones(len(of), 2, dtype=torch.bool), deviation=True)
    got, true = (
        expected(policy, advantages, of, chance, "grpo").flatten(),
        policy.true_gradient(SCORES).flatten(),
    )
    assert float(torch.nn.functional.cosine_similarity(got, true, dim=0)) < 0.999


@pytest.mark.parametrize(("samples", "k"), [(2, 2), (3, 2), (3, 3)])
def test_pass_at_k_ascends_the_expected_best_score_of_k(policy, samples, k):
    of, group, chance = groups(policy, samples)
    advantages = pass_at_k(SCORES[of], group, torch.ones(len(of), 2, dtype=torch.bool), k=k)
    tries = torch.tensor(list(itertools.product(range(9), repeat=k)))
    best = (policy.probabilities()[tries].prod(1) * SCORES[tries].amax(1)).sum()
    torch.testing.assert_close(
        k * expected(policy, advantages, of, chance, "opo"), policy.gradient(best), **EXACT
    )


# -- samples of another policy
# -----------------------------------------------------------------------------------------------------


def weighted(policy, sampler, ratio):
    weights = truncated_weights(
        policy.logprobs().detach(), sampler.logprobs().detach(), ONES, cap=math.inf, ratio=ratio
    )
    return expected(
        policy, SCORES[:, None].expand(9, 2), ALONE, sampler.probabilities().detach(), weights=weights
    )


def test_weights_of_responses_correct_for_another_sampler(policy, reference):
    torch.testing.assert_close(weighted(policy, reference, "sequence"), policy.true_gradient(SCORES), **EXACT)


@pytest.mark.parametrize("ratio", ["token", "geometric"])
def test_other_weights_are_biased(policy, reference, ratio):
    assert (
        weighted(policy, reference, ratio) - policy.true_gradient(SCORES)
    ).norm() > 0.01 * policy.true_gradient(SCORES).norm()


def test_topr_tapers_negative_responses_by_their_ratio(policy, reference):
    """By hand, response by response: responses above the baseline count by their share in the sampler's
    output, the others by the smaller of both shares.
    """
    baseline = 0.35
    now, chance = policy.logprobs(), reference.probabilities().detach()
    advantages, metrics = topr.relative(SCORES, ONES, baseline=baseline)
    value, _ = topr.policy_loss(New(logprobs=now), reference.logprobs().detach(), advantages, ONES)
    got = -policy.gradient(weighted_sum(value, ONES, chance, 1.0))
    own = policy.probabilities().detach()
    share = [
        float(c if s >= baseline else min(c, o)) * (float(s) - baseline)
        for c, o, s in zip(chance, own, SCORES, strict=True)
    ]
    want = policy.gradient(sum(part * row.sum() for part, row in zip(share, policy.logprobs(), strict=True)))
    torch.testing.assert_close(got, want, **EXACT)
    assert metrics["right"].tolist() == [score > baseline for score in SCORES.tolist()]
    # the taper has an effect
    assert any(o < c for c, o, s in zip(chance, own, SCORES, strict=True) if s < baseline)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sapo_gates_the_gradient_around_a_ratio_of_1(sign):
    """The derivative of 4 / tau sigmoid(tau (r - 1)) is 1 / cosh(tau (r - 1) / 2)^2. The gate is sharper for
    negative advantages.
    """
    moved = torch.tensor([[-2.0, -0.5, 0.0, 0.1, 1.0]], dtype=torch.float64, requires_grad=True)
    ones = torch.ones_like(moved)
    value, _ = sapo.policy_loss(
        New(logprobs=moved), 0 * ones, sign * ones, 2 * ones, tau_pos=0.5, tau_neg=3.0
    )
    (slope,) = torch.autograd.grad(value.sum(), moved)
    ratio, tau = moved.detach().exp(), 0.5 if sign > 0 else 3.0
    torch.testing.assert_close(slope, -2 * sign * ratio / (tau * (ratio - 1) / 2).cosh() ** 2, **EXACT)


# -- KL as a loss
# ------------------------------------------------------------------------------------------------------------


def kl_gradient(policy, reference, of_reference):
    """Return the gradient of the KL of each token's distribution, with prefixes drawn from the policy and
    held fixed; or of KL(reference, policy), if requested.
    """
    ours, theirs = policy.logits.log_softmax(-1), reference.logits.log_softmax(-1).detach()
    over = theirs - ours, theirs.exp()
    each = (over[1] * over[0]).sum(-1) if of_reference else (ours.exp() * (ours - theirs)).sum(-1)
    first = ours[0].exp().detach()
    return policy.gradient(each[0] + (first * each[1:]).sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_as_losses_have_known_gradients(policy, reference, estimator):
    """k1 has no gradient in expectation, k2 has the gradient of each token's KL, k3 the gradient of the KL in
    the other direction.
    """
    value = kl(policy.logprobs(), reference.logprobs().detach(), estimator)
    got = policy.gradient(weighted_sum(value, ONES, policy.probabilities().detach(), 1.0))
    want = (
        torch.zeros_like(got)
        if estimator == "k1"
        else kl_gradient(policy, reference, of_reference=estimator == "k3")
    )
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3-weighted"])
def test_grpo_descends_the_kl_of_each_token(policy, reference, estimator):
    now, zeros = policy.logprobs(), torch.zeros(9, 2, dtype=torch.float64)
    columns = now.detach(), zeros, zeros + 1, reference.logprobs().detach()
    value, _ = grpo.policy_loss(New(logprobs=now), *columns, clip=0.2, beta=0.3, estimator=estimator)
    got = policy.gradient(weighted_sum(value, ONES, policy.probabilities().detach(), 1.0))
    torch.testing.assert_close(
        got, 0.3 * kl_gradient(policy, reference, of_reference=estimator == "k3"), **EXACT
    )


def test_distillation_descends_the_reverse_kl_of_each_token(policy, reference):
    """The advantage of a token is only its own KL, so prefixes are held fixed: later tokens of the teacher
    have no effect.
    """
    advantages, _ = distill.judge(policy.logprobs().detach(), reference.logprobs().detach(), ONES)
    got = expected(policy, advantages, ALONE, policy.probabilities().detach(), "distill")
    torch.testing.assert_close(got, -kl_gradient(policy, reference, of_reference=False), **EXACT)


# -- chosen rows, rewards compared separately
# ---------------------------------------------------------------------------------------


def by_hand(policy, samples, advantages):
    """Return the gradient over every group, with advantages that plain Python computes from a group's
    responses.
    """
    chances, weights = policy.probabilities().tolist(), [0.0] * 9
    for responses in itertools.product(range(9), repeat=samples):
        chance = math.prod(chances[response] for response in responses)
        for response, advantage in zip(responses, advantages(responses), strict=True):
            weights[response] += chance * advantage / samples
    return policy.gradient((torch.tensor(weights, dtype=torch.float64) * policy.logprobs().sum(1)).sum())


def standard(values):
    """Subtract the mean from each value and divide by the deviation + 1e-4, like GRPO."""
    deviation = statistics.stdev(values) if len(set(values)) > 1 else 0.0
    return [(value - statistics.fmean(values)) / (deviation + 1e-4) for value in values]


def largest(values, count):
    """Return whether each value is among the ``count`` largest; the first of equal values wins."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    return [i in order for i in range(len(values))]


def chosen(by, group, count):
    axis = Axis(torch.stack([group, torch.arange(len(group))], 1), grouped=True)
    return chosen_rows(by, axis, ChooseOptions(count, "group"))


def test_raft_maximises_the_likelihood_of_the_best_response(policy):
    of, group, chance = groups(policy, 3)
    unequal = raft.unequal(SCORES[of], group)
    best = chosen(torch.where(unequal, SCORES[of], torch.nan), group, 1)
    now = policy.logprobs(RESPONSES[of[best]])
    value, _ = raft.likelihood(New(logprobs=now))
    got = -policy.gradient(weighted_sum(value, torch.ones_like(now, dtype=torch.bool), chance[best], 1.0))

    def share(responses):
        marks = largest([float(SCORES[response]) for response in responses], 1)
        return [float(mark and len(set(responses)) > 1) for mark in marks]

    torch.testing.assert_close(got, by_hand(policy, 3, share), **EXACT)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_cppo_is_grpo_on_the_rows_of_the_largest_advantages(policy, kept):
    of, group, chance = groups(policy, 3)
    # no near ties
    mask, scores = (
        torch.ones(len(of), 2, dtype=torch.bool),
        SCORES + torch.arange(1, 10, dtype=torch.float64).sqrt() / 100,
    )
    advantages = compare(scores[of], group, mask)
    rows = chosen(cppo.magnitude(advantages, mask), group, kept)
    got = expected(policy, advantages[rows], of[rows], chance[rows], "cppo")

    def pruned(responses):
        values = standard([float(scores[response]) for response in responses])
        return [
            value * mark
            for value, mark in zip(
                values, largest([round(abs(value), 9) for value in values], kept), strict=True
            )
        ]

    torch.testing.assert_close(got, by_hand(policy, 3, pruned), rtol=1e-8, atol=1e-10)


def test_gdpo_adds_the_advantages_of_each_reward(policy):
    of, group, chance = groups(policy, 3)
    mask = torch.ones(len(of), 2, dtype=torch.bool)
    advantages = gdpo.add(compare(SCORES[of], group, mask), compare(BINARY[of], group, mask), weight=1.0)
    got = expected(policy, advantages, of, chance, "gdpo")

    def added(responses):
        one, other = (
            standard([float(scores[response]) for response in responses]) for scores in (SCORES, BINARY)
        )
        return [sum(pair) for pair in zip(one, other, strict=True)]

    torch.testing.assert_close(got, by_hand(policy, 3, added), rtol=1e-8, atol=1e-10)


def test_gdpo_distinguishes_combinations_with_equal_sums():
    """GRPO on the sum of two rewards of 0 or 1 sees only the sum, although the rewards differ in frequency."""
    group, mask = torch.zeros(4, dtype=torch.int64), torch.ones(4, 1, dtype=torch.bool)
    common, rare = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    summed = compare(common + rare, group, mask)[:, 0]
    apart = gdpo.add(compare(common, group, mask), compare(rare, group, mask), weight=1.0)[:, 0]
    assert summed[0] == summed[2]
    assert apart[2] > apart[0] > apart[3]


# -- follow-up prompts
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_vineppo_with_the_true_values_is_unbiased_for_any_step_length(policy, step):
    chance, mean = policy.probabilities().detach(), (policy.probabilities() * SCORES).sum().detach()
    after = (policy.logprobs()[:, 1].exp() * SCORES).detach().reshape(3, 3).sum(1)  # for each first token
    values = torch.where(
        vineppo.steps(ONES, step=step), torch.stack([mean.expand(9), after[RESPONSES[:, 0]]], 1), torch.nan
    )
    advantages = vineppo.gain_of_steps(SCORES, values, ONES)
    assert not (step == 1 and torch.equal(advantages[:, 0], advantages[:, 1]))
    torch.testing.assert_close(
        expected(policy, advantages, ALONE, chance, "vineppo"), policy.true_gradient(SCORES), **EXACT
    )


def test_vineppo_credits_a_step_with_its_change_of_value():
    """Masked-out tokens and tokens within a step. A prefix without a value belongs to the step before;
    without the first value all are unknown.
    """
    mask = torch.tensor(
        [[True, True, False, True, True, True], [True, True, True, True, False, False], [True] * 6]
    )
    begins = vineppo.steps(mask, step=2)
    assert begins.tolist() == [
        [True, False, False, True, False, True],
        [True, False, True, False, False, False],
        [True, False] * 3,
    ]
    values = torch.full((3, 6), torch.nan)
    values[begins] = torch.tensor([0.25, 0.5, 0.75, 0.5, 0.25, torch.nan, 0.5, 0.5])
    values[1, 2] = torch.nan
    advantages = vineppo.gain_of_steps(torch.tensor([1.0, 0.0, 1.0]), values, mask)
    torch.testing.assert_close(
        advantages[:2],
        torch.tensor([[0.25, 0.25, 0.0, 0.25, 0.25, 0.25], [-0.5, -0.5, -0.5, -0.5, 0.0, 0.0]]),
    )
    assert advantages[2].isnan().tolist() == [True, True, False, False, False, False]


def turns(players, samples=2):
    """Return every group of rows with one response of each player: the response of each player in each row,
    the group of each row, and its share of the group's probability.

    The players are independent; the scores contain the effect of a turn on the next one.
    """
    of = torch.tensor(list(itertools.product(range(9), repeat=len(players) * samples))).reshape(
        -1, len(players)
    )
    chance = torch.stack(
        [player.probabilities().detach()[of[:, i]] for i, player in enumerate(players)]
    ).prod(0)
    group = torch.arange(len(of) // samples).repeat_interleave(samples)
    return of.T, group, chance.reshape(-1, samples).prod(1).repeat_interleave(samples) / samples


def objective(players, pay):
    """Return the expected reward of a turn, ``pay`` of the responses of all players."""
    of = torch.tensor(list(itertools.product(range(9), repeat=len(players)))).T
    chances = [player.probabilities()[mine] for player, mine in zip(players, of, strict=True)]
    return (torch.stack(chances).prod(0) * pay(*of)).sum()


def each(gain):
    return gain[:, None].expand(-1, 2)


def test_each_attempt_of_a_correction_ascends_its_own_reward():
    players, alpha = (Policy(0), Policy(1)), 3.0
    (first, second), group, chance = turns(players)
    gains = correction.shape(SCORES[first], SCORES[(first + second) % 9], group, alpha=alpha)
    got = expected(players[0], each(gains[0]), first, chance, "correction")
    torch.testing.assert_close(got, players[0].true_gradient(SCORES), **EXACT)
    got = expected(players[1], each(gains[1]), second, chance, "correction")
    pay = objective(players, lambda a, b: SCORES[(a + b) % 9] + alpha * (SCORES[(a + b) % 9] - SCORES[a]))
    torch.testing.assert_close(got, players[1].gradient(pay), **EXACT)


def test_each_turn_of_a_debate_ascends_its_own_reward():
    """The closing turn is a function of the two turns before it and gets its gradient through the reply, so
    the test can list all groups.
    """
    players, share = (Policy(0), Policy(1)), 0.3
    (a, b), group, chance = turns(players)
    scores = SCORES[a], SCORES[(a + b) % 9], SCORES[(a + 2 * b) % 9]
    opening, reply, closing, _ = debate.settle(*scores, group, share=share)

    def later(a, b):
        return SCORES[(a + b) % 9], SCORES[(a + 2 * b) % 9]

    def paid(a, b):
        return (1 - share) * SCORES[a] + share * sum(later(a, b)) / 2

    for player, of, gain, pay in (
        (players[0], a, opening, paid),
        (players[1], b, reply, lambda a, b: (1 - share) * later(a, b)[0] + share * later(a, b)[1]),
        (players[1], b, closing, lambda a, b: later(a, b)[1]),
    ):
        got = expected(player, each(gain), of, chance, "debate")
        torch.testing.assert_close(got, player.gradient(objective(players, pay)), **EXACT)


WORDS = {"right": "RIGHT", "wrong": "WRONG", "correct": 0.5}


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_verifier_ascends_its_agreement_with_the_score(policy, score):
    """The gradient is GRPO's, with its known weight by the mix of the verdicts."""
    of, group, chance = groups(policy, 2)
    readings = ["WRONG, no: RIGHT" if right else "WRONG" for right in BINARY[of].tolist()]
    agrees, believes, _ = critique.judge(
        readings, torch.full((len(of),), score, dtype=torch.float64), **WORDS
    )
    assert torch.equal(believes, BINARY[of])
    got = expected(
        policy, compare(agrees, group, torch.ones(len(of), 2, dtype=torch.bool)), of, chance, "critique"
    )
    objective = BINARY if score else 1 - BINARY
    p = float((policy.probabilities() * objective).sum().detach())
    torch.testing.assert_close(got, difficulty(p, 2) * policy.true_gradient(objective), **EXACT)


def test_a_solver_is_rewarded_for_its_score_and_for_being_believed(policy):
    of, group, chance = groups(policy, 2)
    paid = critique.pay(SCORES[of], BINARY[of], trust=0.2)
    got = expected(
        policy, compare(paid, group, torch.ones(len(of), 2, dtype=torch.bool)), of, chance, "critique"
    )
    want = by_hand(
        policy,
        2,
        lambda rows: standard([0.8 * float(SCORES[row]) + 0.2 * float(BINARY[row]) for row in rows]),
    )
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_verdicts_and_scores_may_be_missing():
    agrees, believes, _ = critique.judge(
        ["", "RIGHT", "RIGHT WRONG"], torch.tensor([0.0, torch.nan, 0.0]), **WORDS
    )
    torch.testing.assert_close(agrees, torch.tensor([0.0, torch.nan, 1.0]), equal_nan=True)
    assert believes.tolist() == [0.0, 1.0, 0.0]
