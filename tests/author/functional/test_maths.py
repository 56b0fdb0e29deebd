"""The arithmetic against plain definitions in float64: with missing, equal and single values, and any values
in the padding.
"""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow import (
    Batch,
    adapted_beta,
    clipped_gain,
    compare,
    gae,
    group_mean,
    group_std,
    kl,
    leave_one_out,
    length_weighted_mean,
    masked_mean,
    pass_at_k,
    place_last,
    reward_to_go,
    row_mean,
    row_sum,
    stop_penalty,
    truncated_weights,
    whiten,
)

NAN = math.nan
AWKWARD = [0.1, 0.2, 0.3, 0.7, 1 / 3, 1e-3, 1e8 + 0.1, -0.1]


@st.composite
def masked(draw):
    """Draw x [rows, T] float64 and a mask with gaps."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    numbers = st.floats(-100, 100)
    x = torch.tensor(
        draw(st.lists(numbers, min_size=rows * width, max_size=rows * width)), dtype=torch.float64
    )
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)))
    return x.reshape(rows, width), mask.reshape(rows, width)


GROUPS = st.lists(
    st.lists(st.one_of(st.just(NAN), st.floats(-100, 100, width=32)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def flattened(groups):
    x = torch.tensor([value for group in groups for value in group], dtype=torch.float32)
    return x, torch.tensor([7 * number for number, group in enumerate(groups) for _ in group])


# -- over a mask
# ------------------------------------------------------------------------------------------------------------


@given(masked())
def test_masked_mean_is_the_mean_of_masked_values(case):
    x, mask = case
    inside = x[mask].tolist()
    assert float(masked_mean(x, mask)) == pytest.approx(statistics.fmean(inside) if inside else 0.0, abs=1e-9)


@given(masked())
def test_whitened_values_have_mean_0_and_deviation_1(case):
    x, mask = case
    white = whiten(x, mask)[mask].tolist()
    if len(white) > 1 and statistics.stdev(x[mask].tolist()) > 0.1:
        assert statistics.fmean(white) == pytest.approx(0, abs=1e-6)
        assert statistics.stdev(white) == pytest.approx(1, rel=1e-5)


@given(masked(), st.sampled_from([NAN, math.inf, -math.inf, 1e30]))
def test_only_masked_values_affect_a_result(case, noise):
    x, mask = case
    noisy = torch.where(mask, x, noise)
    assert torch.equal(masked_mean(noisy, mask), masked_mean(x, mask))
    assert torch.equal(whiten(noisy, mask)[mask], whiten(x, mask)[mask])
    assert torch.equal(
        truncated_weights(noisy, x * 0.5, mask, cap=2.0), truncated_weights(x, x * 0.5, mask, cap=2.0)
    )
    assert torch.equal(reward_to_go(noisy, mask, 0.9), reward_to_go(x, mask, 0.9))
    assert torch.equal(row_sum(noisy, mask), row_sum(x, mask))
    assert torch.equal(row_mean(noisy, mask), row_mean(x, mask))
    quiet, loud = (gae(one, 0.5 * one, mask, gamma=0.9, lam=0.8) for one in (x, noisy))
    assert all(torch.equal(one[mask], other[mask]) for one, other in zip(quiet, loud, strict=True))


def test_non_finite_rows_stay_non_finite_and_out_of_statistics():
    x = torch.tensor([[1.0, 3.0], [NAN, 100.0], [5.0, math.inf]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    assert float(masked_mean(x, mask)) == 3.0
    white = whiten(x, mask)
    assert white[0].tolist() == pytest.approx([-1.0, 0.0])
    assert not bool(white[1].isfinite().all())
    assert float(white[2, 0]) == pytest.approx(1.0)


def test_an_empty_mask_gives_0():
    x, none = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert float(masked_mean(x, none)) == 0.0
    assert not bool(whiten(x, none).any())
    assert whiten(torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)).shape == (0, 0)


@pytest.mark.parametrize("value", AWKWARD)
def test_a_single_value_whitens_to_exactly_0(value):
    assert float(whiten(torch.tensor([[value, 5.0]]), torch.tensor([[True, False]]))[0, 0]) == 0.0


@pytest.mark.parametrize("value", AWKWARD)
@pytest.mark.parametrize("count", [2, 3, 7, 31, 32])
def test_equal_values_whiten_to_exactly_0(value, count):
    x = torch.full((1, count), value)
    assert not bool(whiten(x, torch.ones(1, count, dtype=torch.bool)).any())


def test_statistics_are_computed_in_float64():
    big = torch.tensor([[1e8, 1e8 + 8, 1e8 + 16]])  # float32 has steps of 8 here
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    assert whiten(big, everywhere).tolist()[0] == pytest.approx([-1.0, 0.0, 1.0])
    many = torch.full((1, 1 << 16), 0.1)
    assert float(masked_mean(many, torch.ones_like(many, dtype=torch.bool))) == float(torch.tensor(0.1))


def test_results_keep_a_float_dtype_and_are_else_float32():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for x in (
        torch.ones(1, 2),
        torch.ones(1, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bfloat16),
    ):
        assert masked_mean(x, mask).dtype == whiten(x, mask).dtype == x.dtype
    assert float(masked_mean(torch.tensor([[True, False]]), mask)) == 0.5
    assert float(masked_mean(torch.tensor([[1, 2]]), mask)) == 1.5
    lengths = torch.tensor([1, 2, 5])
    assert group_mean(lengths, torch.tensor([0, 0, 1])).tolist() == [1.5, 1.5, 5.0]


def test_means_have_gradients():
    x = torch.tensor([[1.0, NAN], [2.0, 4.0]], requires_grad=True)
    masked_mean(x, torch.tensor([[True, False], [True, True]])).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1 / 3, 0.0], [1 / 3, 1 / 3]]))


# -- the last token
# ------------------------------------------------------------------------------------------------------------


def test_a_score_is_placed_at_the_last_masked_token():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert place_last(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask).tolist() == [
        [0, 1, 0, 0],
        [0, 0, 2, 0],
        [0, 0, 0, 3],
        [0, 0, 0, 0],
    ]


def test_a_missing_score_stays_missing_in_its_own_row():
    placed = place_last(torch.tensor([NAN, 1.0]), torch.ones(2, 2, dtype=torch.bool))
    assert placed[0].isnan().tolist() == [False, True]
    assert placed[1].tolist() == [0.0, 1.0]


def test_rows_without_tokens_get_no_score():
    assert place_last(torch.ones(3), torch.zeros(3, 0, dtype=torch.bool)).shape == (3, 0)


# -- over groups
# ------------------------------------------------------------------------------------------------------------


@given(GROUPS)
def test_group_statistics_skip_missing_values(groups):
    x, ids = flattened(groups)
    means, deviations, others = group_mean(x, ids), group_std(x, ids), leave_one_out(x, ids)
    row = 0
    for group in groups:
        present = [value for value in group if not math.isnan(value)]
        for value in group:
            rest = list(present)
            if not math.isnan(value):
                rest.remove(value)
            expected = (
                statistics.fmean(present) if present else NAN,
                statistics.stdev(present) if len(present) > 1 else 0.0,
                statistics.fmean(rest) if rest else NAN,
            )
            found = (float(means[row]), float(deviations[row]), float(others[row]))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-4, nan_ok=True)
            row += 1


@given(GROUPS, st.integers(2, 5))
def test_pass_at_k_is_the_mean_gain_over_all_choices_of_others(groups, k):
    x, ids = flattened(groups)
    found = pass_at_k(x.double(), ids, torch.ones(len(x), 1, dtype=torch.bool), k=k)[:, 0].tolist()
    for group in groups:
        there = [value for value in group if not math.isnan(value)]
        for place, value in enumerate(group):
            others = [other for at, other in enumerate(group) if at != place and not math.isnan(other)]
            choices = (
                list(itertools.combinations(others, min(k, len(there)) - 1))
                if others and not math.isnan(value)
                else []
            )
            mean = (
                statistics.fmean(max(value, *choice) - max(choice) for choice in choices) if choices else 0.0
            )
            assert found.pop(0) == pytest.approx(
                NAN if math.isnan(value) else mean, rel=1e-9, abs=1e-4, nan_ok=True
            )


def test_pass_at_k_with_k_of_one_is_refused():
    with pytest.raises(ValueError, match="found k=1, expected at least 2"):
        pass_at_k(torch.ones(2), torch.zeros(2), torch.ones(2, 1, dtype=torch.bool), k=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", AWKWARD)
def test_equal_rewards_give_an_advantage_of_exactly_0(value, dtype):
    sizes = torch.arange(1, 33)  # one group of each
    ids = torch.arange(len(sizes)).repeat_interleave(sizes)
    x = torch.full((len(ids),), value, dtype=dtype)
    assert not bool((x - group_mean(x, ids)).any())
    assert not bool(group_std(x, ids).any())
    assert not bool((x - leave_one_out(x, ids))[ids > 0].any())
    mask = torch.ones(len(x), 1, dtype=torch.bool)
    assert not bool(compare(x, ids, mask).any())
    assert not bool(pass_at_k(x, ids, mask, k=4).any())


MIXED = torch.tensor([1.0, 3.0, 5.0, 0.5, 0.5, 2.0, NAN], dtype=torch.float64)
MIXED_GROUPS = torch.tensor([4, 4, 4, 7, 7, 9, 9])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-2 / 2.0001, 0.0, 2 / 2.0001, 0.0, 0.0, 0.0, NAN]),  # the deviation of 1, 3 and 5 is 2
        ({"deviation": True}, [-2 / 2.0001, 0.0, 2 / 2.0001, 0.0, 0.0, 0.0, NAN]),
        ({"deviation": False}, [-2.0, 0.0, 2.0, 0.0, 0.0, 0.0, NAN]),
    ],
)
def test_scores_are_compared_with_the_mean_of_their_group(settings, expected):
    mask = torch.tensor([[True, False, True]]).repeat(7, 1)
    advantages = compare(MIXED, MIXED_GROUPS, mask, **settings)
    for column in (0, 2):
        assert advantages[:, column].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15, nan_ok=True)
    assert not bool(advantages[:, 1].any())  # an unmasked token has none, also in a row without a score


def test_equal_rewards_stay_equal_despite_a_missing_one():
    x, ids = (
        torch.tensor([0.1, NAN, 0.1, 0.1, 5.0, -5.0], dtype=torch.float64),
        torch.tensor([3, 3, 3, 3, 8, 8]),
    )
    assert (x - group_mean(x, ids))[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert group_std(x, ids)[:4].tolist() == [0.0] * 4
    assert float(group_std(x, ids)[4]) == pytest.approx(math.sqrt(50))


def test_a_singleton_has_its_own_mean_and_no_deviation():
    x, ids = torch.tensor([0.1, 2.0, 3.0]), torch.tensor([5, 1, 1])
    assert group_mean(x, ids)[0] == x[0]
    assert float(group_std(x, ids)[0]) == 0.0
    assert bool(leave_one_out(x, ids)[0].isnan())


def test_a_group_without_scores_has_no_mean_and_no_deviation():
    x, ids = torch.tensor([NAN, NAN, 1.0]), torch.tensor([0, 0, 1])
    assert group_mean(x, ids).isnan().tolist() == [True, True, False]
    assert group_std(x, ids).tolist() == [0.0, 0.0, 0.0]


def test_groups_need_neither_adjacent_rows_nor_numbers_from_0():
    x, ids = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.tensor([-4, 9, -4, 9])
    assert group_mean(x, ids).tolist() == [2.0, 20.0, 2.0, 20.0]


def test_no_rows_have_no_statistics():
    x, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert len(group_mean(x, ids)) == len(group_std(x, ids)) == len(leave_one_out(x, ids)) == 0


def test_an_infinite_score_does_not_become_finite():
    x, ids = torch.tensor([math.inf, 1.0, 2.0]), torch.tensor([0, 0, 1])
    assert not bool(group_mean(x, ids)[0].isfinite())
    assert not bool((x - group_mean(x, ids))[:2].isfinite().any())


# -- KL and importance weights
# -----------------------------------------------------------------------------------------------------


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_the_three_kl_estimators_match_their_formulas(policy, reference):
    p, r = torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    ratio = math.exp(reference - policy)
    assert float(kl(p, r, "k1")) == pytest.approx(policy - reference)
    assert float(kl(p, r, "k2")) == pytest.approx((policy - reference) ** 2 / 2)
    assert float(kl(p, r, "k3")) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-12, abs=1e-12)
    assert float(kl(p, r, "k3")) >= -1e-12


def test_k1_and_k3_equal_the_kl_in_expectation():
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    true = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3"):
        assert float((policy.exp() * kl(policy, reference, estimator)).sum()) == pytest.approx(true)


def test_an_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="found estimator 'k4', expected 'k1', 'k2' or 'k3'"):
        kl(torch.zeros(1), torch.zeros(1), "k4")


def test_weights_are_ratios_up_to_the_cap_and_1_outside_the_mask():
    new, old = torch.tensor([[0.0, -1.0, NAN]]), torch.tensor([[-2.0, -0.5, 0.0]])
    weights = truncated_weights(new, old, torch.tensor([[True, True, False]]), cap=2.0)
    assert weights.tolist()[0] == pytest.approx([2.0, math.exp(-0.5), 1.0])


def test_a_missing_log_prob_under_the_mask_stays_missing():
    assert bool(
        truncated_weights(torch.tensor([[NAN]]), torch.zeros(1, 1), torch.tensor([[True]]), cap=2.0).isnan()
    )


# -- shared by policy-gradient methods
# ---------------------------------------------------------------------------------------------


@given(GROUPS)
def test_with_equal_lengths_the_length_weighted_mean_is_the_mean(groups):
    x, group = flattened(groups)
    weighted = length_weighted_mean(x, torch.full_like(group, 3), group)
    assert torch.allclose(weighted, group_mean(x, group), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_long_response_weighs_more_and_a_missing_score_is_skipped():
    x, lengths = torch.tensor([1.0, 0.0, NAN]), torch.tensor([3, 1, 100])
    assert length_weighted_mean(x, lengths, torch.zeros(3, dtype=torch.int64)).tolist() == [0.75] * 3


@pytest.mark.parametrize("value", AWKWARD)
def test_the_length_weighted_mean_of_equal_scores_is_their_value(value):
    x = torch.full((7,), value)
    assert torch.equal(length_weighted_mean(x, torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)), x)


@given(masked())
def test_the_reward_to_go_is_the_sum_of_later_rewards(case):
    x, mask = case
    padded = torch.where(mask, x, torch.nan)
    plain = torch.where(mask, x, 0.0).flip(1).cumsum(1).flip(1)
    assert torch.allclose(reward_to_go(padded, mask)[mask], plain[mask])
    assert not reward_to_go(padded, mask)[~mask].any()


def test_the_discount_skips_unmasked_tokens():
    x, mask = torch.tensor([[1.0, 7.0, 4.0]]), torch.tensor([[True, False, True]])
    assert reward_to_go(x, mask, 0.5).tolist() == [[3.0, 0.0, 4.0]]


@given(masked())
def test_row_sums_and_means_are_per_row(case):
    x, mask = case
    padded = torch.where(mask, x, torch.nan)
    inside = [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]
    assert row_sum(padded, mask).tolist() == pytest.approx([sum(row) for row in inside], abs=1e-9)
    assert row_mean(padded, mask).tolist() == pytest.approx(
        [sum(row) / max(len(row), 1) for row in inside], abs=1e-9
    )


def test_the_clip_takes_the_lower_gain():
    ratio, advantages = torch.tensor([0.5, 0.5, 2.0, 2.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert clipped_gain(ratio, advantages, 0.25, 0.5).tolist() == [0.5, -0.75, 1.5, -2.0]


def test_dual_clip_bounds_the_cost_of_a_negative_advantage():
    ratio, advantages = torch.tensor([0.5, 2.0, 5.0, 5.0, 5.0]), torch.tensor([-1.0, -1.0, -1.0, 1.0, 0.0])
    assert clipped_gain(ratio, advantages, 0.25, 0.5, dual=3.0).tolist() == [-0.75, -2.0, -3.0, 1.5, 0.0]
    assert clipped_gain(ratio, advantages, 0.25, 0.5).tolist() == [-0.75, -2.0, -5.0, 1.5, 0.0]


def test_beyond_the_dual_clip_there_is_no_gradient():
    ratio = torch.tensor([2.0, 5.0], requires_grad=True)
    clipped_gain(ratio, torch.tensor([-1.0, -1.0]), 0.25, 0.5, dual=3.0).sum().backward()
    assert ratio.grad.tolist() == [-1.0, 0.0]


# -- a coefficient that follows a target
# -------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 10), st.floats(0, 100), st.floats(0.01, 10), st.floats(0, 1))
def test_the_kl_coefficient_follows_its_target_by_a_fifth_at_most(beta, observed, target, rate):
    price = torch.tensor(beta, dtype=torch.float64)
    after = float(adapted_beta(price, torch.tensor(observed, dtype=torch.float64), target=target, rate=rate))
    assert after == pytest.approx(beta * (1 + rate * min(max(observed / target - 1, -0.2), 0.2)))
    assert (after - beta) * (observed - target) >= 0
    assert abs(after - beta) <= 0.2 * beta * (1 + 1e-9)


@pytest.mark.parametrize(("observed", "expected"), [(NAN, 0.1), (math.inf, 0.12), (6.0, 0.1), (0.0, 0.08)])
def test_the_kl_coefficient_matches_a_hand_computation(observed, expected):
    assert float(
        adapted_beta(torch.tensor(0.1), torch.tensor(observed), target=6.0, rate=1.0)
    ) == pytest.approx(expected)


def test_only_truncated_responses_are_penalised():
    scores = torch.tensor([1.0, 1.0, math.nan, 0.5])
    batch = Batch.of({"scores": scores, "finish": ["length", "stop", "length", "length"]})
    assert stop_penalty(batch, coef=0.5)["scores"].tolist() == pytest.approx(
        [0.5, 1.0, NAN, 0.25], nan_ok=True
    )


def test_a_negative_coefficient_is_the_score_of_a_truncated_response():
    batch = Batch.of(
        {
            "scores": torch.tensor([1.0, 1.0, -3.0, math.nan, -1.0]),
            "finish": ["length", "stop", "length", "length", "stop"],
        }
    )
    assert stop_penalty(batch, coef=-0.5)["scores"].tolist() == pytest.approx(
        [-0.5, 1.0, -0.5, NAN, -1.0], nan_ok=True
    )


@pytest.mark.parametrize("coef", [1.0001, math.inf, NAN])
def test_a_coefficient_that_rewards_truncation_is_refused(coef):
    with pytest.raises(ValueError, match=r"found coef=.*, expected a number of at most 1"):
        stop_penalty.function(torch.ones(1), ["length"], coef=coef)


def test_gae_is_the_sum_of_discounted_errors():
    rewards, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 0.25, 1.0]])
    errors = [0.9 * 0.25 - 0.5, 1.0 + 0.9 * 1.0 - 0.25, 2.0 - 1.0]
    wanted = [sum((0.9 * 0.8) ** k * error for k, error in enumerate(errors[t:])) for t in range(3)]
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.8)
    assert torch.allclose(advantages, torch.tensor([wanted]))
    assert torch.allclose(returns, advantages + values)
