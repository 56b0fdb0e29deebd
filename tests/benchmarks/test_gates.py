"""Corridors of trusted history: their bounds, the failures, and the rate of false failures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.gates import gated

# mean 10, standard deviation 0.790569: 95 % of one more lie within 2.77645 · 0.866025 = 2.40447
FIVE = [10.0, 11.0, 9.0, 10.5, 9.5]
HISTORY = st.lists(st.integers(-1000, 1000).map(float), min_size=5, max_size=12)


def gate(value, history=FIVE, better="higher", **keywords):
    [only] = gated({"speed": better}, {"speed": history}, {"speed": value}, **keywords).gates
    return only


def test_the_corridor_is_the_prediction_interval_of_one_more_run():
    assert gate(10.0).corridor == pytest.approx((10 - 2.40447, 10 + 2.40447), abs=1e-4)
    assert gate(10.0, alpha=0.01).corridor == pytest.approx(
        (10 - 4.60409 * 0.866025, 10 + 4.60409 * 0.866025), abs=1e-4
    )


@pytest.mark.parametrize(
    ("value", "better", "state"),
    [
        (12.3, "higher", "inside"),
        (7.7, "lower", "inside"),
        (12.5, "higher", "improvement"),
        (12.5, "lower", "regression"),
        (7.5, "higher", "regression"),
        (7.5, "lower", "improvement"),
    ],
)
def test_both_sides_of_the_corridor_fail_with_their_name(value, better, state):
    found = gate(value, better=better)
    assert (found.state, found.failed) == (state, state != "inside")
    assert state in found.text
    assert "5 trusted runs" in found.text


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_missing_value_fails_with_or_without_history(value):
    for history in (FIVE, []):
        found = gate(value, history)
        assert (found.state, found.failed) == ("missing", True)
        assert "speed: error, the run has no finite value" in found.text
    assert gated({"speed": "higher"}, {"speed": FIVE}, {}).exit_code == 1


@pytest.mark.parametrize("history", [[], FIVE[:4], [*FIVE[:4], math.nan]])
def test_a_short_history_passes_with_a_remark(history):
    found = gate(99.0, history)
    assert (found.state, found.failed) == ("no history", False)
    assert (
        found.text == f"speed: 99, passes without history ({min(len(history), 4)} trusted runs of at least 5)"
    )


def test_the_suite_fails_with_a_gate_and_prints_all():
    history = {"speed": FIVE, "loss": FIVE}
    declared = {"speed": "higher", "loss": "lower"}
    fine = gated(declared, history, {"speed": 10.0, "loss": 10.0, "other": math.nan})
    assert (fine.exit_code, [g.metric for g in fine.gates]) == (0, ["speed", "loss"])
    assert len(fine.text.splitlines()) == 2
    assert gated(declared, history, {"speed": 10.0, "loss": 99.0}).exit_code == 1


def test_levels_follow_holms_procedure():
    """p = 0.04 alone is outside at 5 %. With two other gates inside it is not; with one far outside it is."""
    one = 10 + 0.866025 * 2.9985  # p = 0.04 with 4 degrees of freedom
    names = {"a": "higher", "b": "higher"}
    history = dict.fromkeys(names, FIVE)

    def states(a, b):
        return [found.state for found in gated(names, history, {"a": a, "b": b}).gates]

    assert gate(one).state == "improvement"
    assert states(one, 10.0) == ["inside", "inside"]
    assert states(one, 0.0) == ["improvement", "regression"]


def test_unchanged_suites_rarely_fail():
    rng = np.random.default_rng(0)
    names = [f"metric{number}" for number in range(6)]
    runs = rng.normal(size=(600, 6, 7))
    failed = [
        gated(
            dict.fromkeys(names, "higher"),
            dict(zip(names, suite[:, :6], strict=True)),
            dict(zip(names, suite[:, 6], strict=True)),
        ).exit_code
        for suite in runs
    ]
    assert 0.02 <= np.mean(failed) <= 0.07


def test_a_history_without_spread_allows_only_rounding():
    assert gate(2.0, [2.0] * 5).state == "inside"
    assert gate(2.0 + 1e-12, [2.0] * 5).state == "inside"
    assert gate(2.1, [2.0] * 5).state == "improvement"
    assert gate(0.0, [0.0] * 5).state == "inside"
    assert gate(-0.1, [0.0] * 5).state == "regression"


@given(HISTORY, st.integers(-3000, 3000).map(float), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scale_order_and_sign_do_not_matter(history, value, scale):
    plain = gate(value, history)
    assert gate(value * scale, [scale * run for run in history]).state == plain.state
    assert gate(value, sorted(history)).state == plain.state
    assert gate(-value, [-run for run in history], better="lower").state == plain.state


@given(HISTORY, st.floats(0, 1000), st.floats(0, 1000))
def test_a_value_farther_out_stays_outside(history, near, step):
    mean = float(np.mean(history))
    inside = [gate(mean + distance, history).state == "inside" for distance in (near, near + step)]
    assert inside != [False, True]


@given(st.lists(st.floats(-1e100, 1e100), max_size=9), st.floats(-1e100, 1e100))
def test_every_finite_case_has_a_sentence(history, value):
    found = gate(value, history)
    low, high = found.corridor or (value, value)
    assert found.text.startswith("speed: ")
    assert low <= high
    assert found.corridor is None or found.failed == (not low <= value <= high)
