"""Forecasts for undecided pairs: they are right for known noise, and they are bounded."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.forecast import FARTHEST, announced, observations_left

ERRORS = st.floats(0, 1e300)


@given(st.integers(2, 10_000), ERRORS, st.floats(0, 1e300), st.sampled_from([0.95, 0.99]), st.floats(1, 1e6))
def test_a_forecast_is_between_1_and_the_maximum(count, error, effect, level, freedom):
    assert 1 <= observations_left(count, error, effect, level, freedom) <= FARTHEST


@given(st.integers(2, 100), st.floats(0.001, 10), st.floats(0.01, 10), st.floats(1.0, 5.0))
def test_more_noise_or_a_smaller_effect_needs_more(count, error, effect, factor):
    noisier, smaller = ((count, error * factor, effect), (count, error, effect / factor))
    least = observations_left(count, error, effect, 0.95, count - 1)
    assert observations_left(*noisier, 0.95, count - 1) >= least
    assert observations_left(*smaller, 0.95, count - 1) >= least


def test_the_forecast_finds_a_known_difference_in_80_percent():
    """Simulated with normal noise of 1, an effect of 0.3, and the normal quantile (many degrees of freedom)."""
    count, effect = 40, 0.3
    total = count + observations_left(count, 1 / math.sqrt(count), effect, 0.95, 1e9)
    means = np.random.default_rng(0).normal(effect, 1 / math.sqrt(total), 20_000)
    assert np.mean(means > 1.96 / math.sqrt(total)) == pytest.approx(0.8, abs=0.015)


@pytest.mark.parametrize(
    ("left", "least", "text"),
    [
        (7, False, "about 7 more rounds"),
        (1, False, "about 1 more round"),
        (4, True, "at least 4 more rounds"),
        (FARTHEST - 1, False, "about 999 more rounds"),
        (FARTHEST, False, "more than 1000 more rounds"),
    ],
)
def test_the_wording_shows_how_certain_the_number_is(left, least, text):
    assert announced(left, "rounds", least=least) == text
