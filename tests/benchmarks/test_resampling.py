"""Bootstrap intervals: their ends, and the method that they report."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlflow.benchmarks.resampling import _corrected, bca, draws, medians_left_out, percentile

VALUES = arrays(np.float64, st.integers(2, 30), elements=st.integers(-1000, 1000).map(float))


@given(VALUES)
def test_jackknife_medians_are_medians(values):
    expected = [np.median(np.delete(values, number)) for number in range(len(values))]
    assert medians_left_out(values) == pytest.approx(expected)


def test_draws_use_all_rows_and_repeat_for_a_seed():
    assert set(draws(7, 50, 3).ravel()) == set(range(7))
    assert draws(7, 50, 3).shape == (50, 7)
    assert (draws(7, 50, 3) != draws(7, 50, 4)).any()


def test_bca_follows_efron_on_a_skewed_mean():
    """The interval of the mean of skewed values is to the right of the percentile interval, by Efron's formula.

    For a mean, the acceleration is the skewness of the sample ÷ 6√n.
    """
    sample = np.random.default_rng(0).exponential(size=40)
    values = sample[draws(40, 4000, 0)].mean(axis=1)
    left_out = (sample.sum() - sample) / 39
    interval, plain = bca(values, float(sample.mean()), left_out, 0.95), percentile(values, 0.95)
    assert interval.method == "BCa"
    assert plain.low < interval.low < sample.mean() < plain.high < interval.high
    centred = sample - sample.mean()
    acceleration = (centred**3).sum() / (6 * (centred**2).sum() ** 1.5)
    bias = NormalDist().inv_cdf(float((values < sample.mean()).mean()))
    reach = bias + np.array([-1.959964, 1.959964])
    ends = [NormalDist().cdf(bias + z / (1 - acceleration * z)) for z in reach]
    assert (interval.low, interval.high) == pytest.approx(np.quantile(values, ends))


def test_without_skew_bca_is_the_percentile_interval():
    values = np.linspace(-1, 1, 1001)
    interval = bca(values, 0.0, np.array([-1.0, 0.0, 1.0]), 0.9)
    assert interval.method == "BCa"
    assert (interval.low, interval.high) == pytest.approx((-0.9, 0.9), abs=1e-3)


@pytest.mark.parametrize(
    ("observed", "left_out", "method"),
    [
        (-2.0, [0.0, 1.0, 5.0], "percentile"),  # all resamples on one side
        (2.0, [0.0, 1.0, 5.0], "percentile"),
        (0.0, [1.0, 1.0, 1.0], "percentile"),  # no spread, so the skewness is unknown
        (0.0, [0.0, 1.0, 5.0], "BCa"),
    ],
)
def test_a_degenerate_bca_falls_back_to_percentiles(observed, left_out, method):
    values = np.linspace(-1, 1, 101)
    interval = bca(values, observed, np.array(left_out), 0.9)
    assert interval.method == method
    assert f"(90 %, {method})" in interval.text
    if method == "percentile":
        assert (interval.low, interval.high) == pytest.approx((-0.9, 0.9))


def test_equal_values_have_no_spread():
    assert bca(np.ones(9), 1.0, np.ones(3), 0.95).method == "no spread"


@pytest.mark.parametrize("acceleration", [1.0, 1.5])
def test_an_end_is_nan_if_acceleration_reverses_the_order(acceleration):
    assert np.isnan(_corrected(1.0, 0.0, acceleration))
    assert _corrected(1.0, 0.0, 0.5) == pytest.approx(NormalDist().cdf(2.0))
