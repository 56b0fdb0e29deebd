"""Student's t against printed tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.student import t_quantile, t_tail


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 4, 2.77645),
        (0.975, 9, 2.26216),
        (0.95, 5, 2.01505),
        (0.995, 5, 4.03214),
        (0.9995, 10, 4.58689),
        (0.975, 120, 1.97993),
        (0.975, 1e5, 1.95996),
    ],
)
def test_quantiles_match_printed_tables(probability, freedom, quantile):
    assert t_quantile(probability, freedom) == pytest.approx(quantile, rel=1e-5)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-quantile, rel=1e-5)


@given(st.floats(-50, 50), st.floats(1, 20_000))
def test_quantile_and_tail_are_inverse(t, freedom):
    tail = t_tail(t, freedom)
    assert tail + t_tail(-t, freedom) == pytest.approx(1)
    if 1e-6 < tail < 1 - 1e-6:
        assert t_quantile(1 - tail, freedom) == pytest.approx(t, abs=1e-5, rel=1e-6)


@given(st.floats(0, 30), st.floats(0.01, 5), st.floats(1, 500))
def test_the_tail_decreases(t, step, freedom):
    assert t_tail(t + step, freedom) < t_tail(t, freedom) + 1e-12
