"""Gains of responses and choices of tokens: by hand, and with any values in the padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow import clipped_gain, drawn_tokens, geometric_gain, largest_tokens, token_covariance

NAN = math.nan
NOISE = st.sampled_from([NAN, math.inf, -math.inf, 1e30])


@st.composite
def tokens(draw):
    """Draw two columns [rows, T] float64 and a mask with gaps."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    numbers = st.lists(st.floats(-3, 3), min_size=rows * width, max_size=rows * width)
    one, two = (torch.tensor(draw(numbers), dtype=torch.float64).reshape(rows, width) for _ in range(2))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))).reshape(
        rows, width
    )
    return one, two, mask


def gain_and_gradient(log_ratio, advantages, mask):
    x = log_ratio.clone().requires_grad_()
    gain = geometric_gain(x, advantages, mask, 0.4, 0.4)
    gain.sum().backward()
    return gain.detach(), x.grad


# -- geometric mean
# ------------------------------------------------------------------------------------------------------------


def test_a_geometric_gain_is_clipped_if_the_clip_lowers_it():
    log_ratio = torch.tensor([[0.9, -0.9, NAN], [0.9, -0.9, NAN]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, 2.0, NAN], [-2.0, -2.0, NAN]], dtype=torch.float64)
    gain, gradient = gain_and_gradient(log_ratio, advantages, torch.tensor([[True, True, False]] * 2))
    assert gain.tolist() == pytest.approx([2 * math.exp((0.4 - 0.9) / 2), -2 * math.exp((0.9 - 0.4) / 2)])
    # a clipped response has no gradient
    assert (gradient != 0).tolist() == [[False, True, False], [True, False, False]]


def test_without_a_clip_the_gain_is_the_geometric_mean_ratio():
    ratio = torch.tensor([[1.1, 0.9, 1.2]], dtype=torch.float64)
    gain = geometric_gain(
        ratio.log(), torch.full_like(ratio, 3.0), torch.ones(1, 3, dtype=torch.bool), 0.4, 0.4
    )
    assert float(gain) == pytest.approx(3 * (1.1 * 0.9 * 1.2) ** (1 / 3))


def test_a_response_without_tokens_gains_nothing():
    gain, gradient = gain_and_gradient(
        torch.full((1, 2), NAN), torch.full((1, 2), NAN), torch.zeros(1, 2, dtype=torch.bool)
    )
    assert gain.tolist() == [0.0]
    assert not bool(gradient.any())


@given(tokens(), NOISE)
def test_only_masked_tokens_of_its_row_affect_a_geometric_gain(case, noise):
    log_ratio, advantages, mask = case
    gain, gradient = gain_and_gradient(log_ratio, advantages, mask)
    noisy = gain_and_gradient(torch.where(mask, log_ratio, noise), torch.where(mask, advantages, noise), mask)
    assert torch.equal(noisy[0], gain)
    assert torch.equal(noisy[1], gradient)
    alone = [
        geometric_gain(log_ratio[i : i + 1], advantages[i : i + 1], mask[i : i + 1], 0.4, 0.4)
        for i in range(len(mask))
    ]
    assert torch.equal(torch.cat(alone), gain)


# -- covariance
# ------------------------------------------------------------------------------------------------------------


def test_a_covariance_matches_a_hand_computation():
    logprobs, advantages = torch.tensor([[-1.0, -2.0], [-3.0, NAN]]), torch.tensor([[1.0, 1.0], [-2.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    assert token_covariance(logprobs, advantages, mask).tolist() == [[1.0, 0.0], [2.0, 0.0]]


def test_a_missing_row_stays_missing_and_out_of_the_means():
    logprobs, advantages = torch.tensor([[-1.0], [-3.0], [-9.0]]), torch.tensor([[1.0], [-1.0], [NAN]])
    covariance = token_covariance(logprobs, advantages, torch.ones(3, 1, dtype=torch.bool))
    assert bool(covariance[2].isnan())
    assert not bool(largest_tokens(covariance, torch.ones(3, 1, dtype=torch.bool), 3)[2])


@given(tokens(), NOISE)
def test_only_masked_tokens_affect_a_covariance_or_a_choice(case, noise):
    logprobs, advantages, mask = case
    covariance = token_covariance(logprobs, advantages, mask)
    noisy = token_covariance(torch.where(mask, logprobs, noise), torch.where(mask, advantages, noise), mask)
    assert torch.equal(noisy, covariance)
    assert torch.equal(
        largest_tokens(torch.where(mask, covariance, noise), mask, 2), largest_tokens(covariance, mask, 2)
    )


# -- choosing
# ------------------------------------------------------------------------------------------------------------


@given(tokens(), st.integers(0, 8))
def test_the_largest_values_are_chosen_up_to_the_available_count(case, count):
    x, _, mask = case
    chosen = largest_tokens(x, mask, count)
    assert int(chosen.sum()) == min(count, int(mask.sum()))
    assert not bool((chosen & ~mask).any())
    left = mask & ~chosen
    if chosen.any() and left.any():
        assert float(x[chosen].min()) >= float(x[left].max())


@given(tokens(), st.integers(0, 8), st.integers(0, 99))
def test_a_draw_takes_masked_tokens_and_ignores_padding(case, count, seed):
    _, _, mask = case
    chosen = drawn_tokens(mask, count, torch.Generator().manual_seed(seed))
    assert int(chosen.sum()) == min(count, int(mask.sum()))
    assert not bool((chosen & ~mask).any())
    wider = torch.cat([mask, torch.zeros(len(mask), 3, dtype=torch.bool)], dim=1)
    assert torch.equal(
        drawn_tokens(wider, count, torch.Generator().manual_seed(seed))[:, : mask.shape[1]], chosen
    )


def test_every_token_is_equally_likely_to_be_drawn():
    mask, generator = (
        torch.tensor([[True, True, False], [True, True, True]]),
        torch.Generator().manual_seed(0),
    )
    drawn = sum(drawn_tokens(mask, 2, generator).double() for _ in range(2000)) / 2000
    assert drawn[mask].tolist() == pytest.approx([0.4] * 5, abs=0.05)


def test_the_dual_clip_affects_only_negative_advantages():
    ratio, advantages = torch.tensor([[10.0, 10.0, 10.0]]), torch.tensor([[0.5, -0.5, 0.0]])
    assert torch.allclose(
        clipped_gain(ratio, advantages, 0.2, 0.2, dual=3.0), torch.tensor([[0.6, -1.5, 0.0]])
    )
    assert torch.allclose(clipped_gain(ratio, advantages, 0.2, 0.2), torch.tensor([[0.6, -5.0, 0.0]]))
