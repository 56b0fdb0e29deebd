"""Importance weights: by hand, per token and per response, and with any values in the padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow import importance_ratio, kl, masked_weights, rejected_weights, truncated_weights

NAN = math.nan
STAGES = [
    lambda new, old, mask, ratio: truncated_weights(new, old, mask, cap=1.5, floor=0.5, ratio=ratio),
    lambda new, old, mask, ratio: masked_weights(new, old, mask, low=0.5, high=1.5, ratio=ratio),
    lambda new, old, mask, ratio: rejected_weights(new, old, mask, limit=0.2, over=OVER[ratio]),
]
OVER = {"token": "token", "sequence": "sum", "geometric": "mean"}
RATIOS = ["token", "sequence", "geometric"]
LOG = {2.0: math.log(2), 0.25: math.log(0.25)}
NEW = torch.tensor(
    [[LOG[2.0], LOG[0.25], NAN, 0.0], [LOG[2.0], LOG[2.0], LOG[2.0], NAN]], dtype=torch.float64
)
OLD = torch.zeros_like(NEW)
MASK = torch.tensor([[True, True, False, True], [True, True, True, False]])


@st.composite
def sampled(draw):
    """Draw logprobs, sampled_logprobs [rows, T] float64 and a mask with gaps."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    numbers = st.lists(st.floats(-8, 0), min_size=rows * width, max_size=rows * width)
    new, old = (torch.tensor(draw(numbers), dtype=torch.float64).reshape(rows, width) for _ in range(2))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))).reshape(
        rows, width
    )
    return new, old, mask


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("token", [[2.0, 0.25, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0]]),
        ("sequence", [[0.5, 0.5, 1.0, 0.5], [8.0, 8.0, 8.0, 1.0]]),
        ("geometric", [[0.5 ** (1 / 3), 0.5 ** (1 / 3), 1.0, 0.5 ** (1 / 3)], [2.0, 2.0, 2.0, 1.0]]),
    ],
)
def test_the_ratio_is_per_token_per_response_or_a_geometric_mean(ratio, expected):
    torch.testing.assert_close(
        importance_ratio(NEW, OLD, MASK, ratio), torch.tensor(expected, dtype=torch.float64)
    )


def test_truncated_weights_are_between_floor_and_cap():
    weights = truncated_weights(NEW, OLD, MASK, cap=1.75, floor=0.5)
    torch.testing.assert_close(
        weights, torch.tensor([[1.75, 0.5, 1.0, 1.0], [1.75, 1.75, 1.75, 1.0]], dtype=torch.float64)
    )


def test_masked_weights_are_0_outside_the_band():
    weights = masked_weights(NEW, OLD, MASK, low=0.5, high=2.0)
    torch.testing.assert_close(
        weights, torch.tensor([[2.0, 0.0, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0]], dtype=torch.float64)
    )
    whole = masked_weights(NEW, OLD, MASK, low=0.5 - 1e-9, high=2.0, ratio="sequence")
    torch.testing.assert_close(
        whole, torch.tensor([[0.5, 0.5, 1.0, 0.5], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("over", "limit", "dropped"),
    [
        ("mean", 0.31, [True, False]),
        ("mean", 0.3, [True, True]),
        ("mean", 0.32, [False, False]),
        ("sum", 0.93, [True, False]),
        ("max", 0.5, [True, False]),
        ("max", 0.7, [False, False]),
    ],
)
def test_responses_are_rejected_by_the_kl_of_their_tokens(over, limit, dropped):
    """k3 of a ratio r is r - 1 - log r: 0.307 for 2, 0.636 for 0.25, 0 for 1.

    The first row has the ratios 2, 0.25 and 1: mean 0.314, sum 0.943, maximum 0.636. The second row has three
    ratios of 2: 0.307, 0.921 and 0.307.
    """
    kept = rejected_weights(NEW, OLD, MASK, limit=limit, over=over)
    assert kept[MASK].tolist() == [float(not dropped[row]) for row in (0, 0, 0, 1, 1, 1)]
    assert kept[~MASK].tolist() == [1.0, 1.0]


@given(
    sampled(),
    st.sampled_from(["k2", "k3"]),
    st.sampled_from(["mean", "sum", "max", "token"]),
    st.floats(0, 3),
)
def test_rejection_keeps_the_weights_of_other_responses(case, estimator, over, limit):
    new, old, mask = case
    weights = truncated_weights(new, old, mask, cap=2.0)
    kept = rejected_weights(new, old, mask, weights, limit=limit, estimator=estimator, over=over)
    by_hand = kl(old, new, estimator)
    for row, inside in enumerate(mask):
        drifts = by_hand[row][inside]
        if not len(drifts):
            continue
        drift = {"mean": drifts.mean(), "sum": drifts.sum(), "max": drifts.max(), "token": drifts}[
            over
        ].expand(len(drifts))
        clear = (drift - limit).abs() > 1e-9 * (1 + limit)
        want = torch.where(drift > limit, 0.0, weights[row][inside])
        assert torch.equal(kept[row][inside][clear], want[clear])


def test_an_unknown_kind_of_rejection_is_refused():
    with pytest.raises(ValueError, match="found over='row', expected 'mean', 'sum', 'max' or 'token'"):
        rejected_weights(NEW, OLD, MASK, limit=1.0, over="row")


@given(sampled(), st.sampled_from([NAN, math.inf, -math.inf, 1e30]))
def test_only_masked_tokens_of_its_row_affect_a_weight(case, noise):
    new, old, mask = case
    for number, weigh in enumerate(STAGES):
        for ratio in RATIOS:
            weights = weigh(new, old, mask, ratio)
            noisy = weigh(torch.where(mask, new, noise), torch.where(mask, old, noise), mask, ratio)
            assert torch.equal(noisy, weights), (number, ratio)
            alone = [weigh(new[i : i + 1], old[i : i + 1], mask[i : i + 1], ratio) for i in range(len(new))]
            assert torch.equal(torch.cat(alone), weights), (number, ratio)
            assert bool((weights[~mask] == 1).all()), (number, ratio)


@pytest.mark.parametrize("weigh", STAGES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_missing_log_prob_stays_missing_in_its_own_row(weigh, ratio):
    new = torch.tensor([[NAN, 0.0], [0.0, 0.0]])
    weights = weigh(new, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), ratio)
    assert bool(weights[0].isnan().any())
    assert weights[1].tolist() == [1.0, 1.0]


def test_an_overflowing_product_of_ratios_is_cut_or_dropped():
    new, old, mask = torch.zeros(1, 4000), torch.full((1, 4000), -1.0), torch.ones(1, 4000, dtype=torch.bool)
    assert truncated_weights(new, old, mask, cap=2.0, ratio="sequence").unique().tolist() == [2.0]
    assert masked_weights(new, old, mask, low=0.5, high=2.0, ratio="sequence").unique().tolist() == [0.0]


def test_an_unknown_ratio_is_refused():
    with pytest.raises(ValueError, match="found ratio='row', expected 'token', 'sequence' or 'geometric'"):
        truncated_weights(NEW, OLD, MASK, cap=2.0, ratio="row")
