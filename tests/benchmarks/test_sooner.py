"""Comparison by the time to a goal: seeds are pairs, and a goal that some seeds miss decides nothing."""

import math

import numpy as np
import pytest

from rlflow.benchmarks.curves import Cell, Curve, Point
from rlflow.benchmarks.sooner import compared, crossing


def curve(seed, seconds, values=(0.2, 0.6, 1.0)):
    return Curve(seed, tuple(Point(4 * i, seconds * i, 0, value) for i, value in enumerate(values)))


def cell(name, seconds, **keywords):
    return Cell(name, tuple(curve(seed, each, **keywords) for seed, each in enumerate(seconds)))


def test_a_goal_is_reached_at_the_interpolated_crossing():
    assert crossing(curve(0, 10.0), 0.6) == pytest.approx(10.0)
    assert crossing(curve(0, 10.0), 0.8) == pytest.approx(15.0)
    assert crossing(curve(0, 10.0), 1.1) is None
    assert crossing(curve(0, 10.0, (0.2, 0.7, 0.3, 0.9)), 0.5) == pytest.approx(6.0)


def test_half_the_seconds_in_every_seed_is_sooner():
    times = np.array([10.0, 14.0, 30.0, 11.0, 19.0])
    noise = np.array([1.0, 1.03, 0.98, 1.01, 0.99])
    found = compared(cell("a", times * noise / 2), cell("b", times), 0.8, margin=0.05)
    assert found.outcome == "sooner"
    assert found.ratio == pytest.approx(0.5, rel=0.02)
    assert found.interval.low < 0.5 < found.interval.high < 0.55
    assert found.text.startswith("sooner; 0.5")
    assert "5 pairs of seeds, margin 5 %; medians 10.82 s vs 21 s" in found.text
    assert compared(cell("b", times), cell("a", times * noise / 2), 0.8, margin=0.05).outcome == "later"
    assert (
        compared(cell("a", times * noise), cell("b", times), 0.8, margin=0.05).outcome
        == "same within the margin"
    )


def test_a_noisy_pair_is_undecided_with_a_forecast():
    times = np.array([10.0, 14.0, 30.0, 11.0, 19.0])
    found = compared(
        cell("a", times * np.array([0.7, 1.2, 0.8, 1.1, 0.9])), cell("b", times), 0.8, margin=0.05
    )
    assert found.outcome == "undecided"
    assert found.more > 5
    assert found.text.startswith(f"undecided, about {found.more} more seeds; ")
    wider = compared(
        cell("a", times * np.array([0.7, 1.2, 0.8, 1.1, 0.9])), cell("b", times), 0.8, margin=0.05, pairs=4
    )
    assert wider.interval.low < found.interval.low  # several cells share the error probability


def test_the_interval_has_its_nominal_coverage():
    rng, covered = np.random.default_rng(5), 0
    for _ in range(300):
        times = rng.lognormal(2.0, 0.5, 5)
        found = compared(
            cell("a", times * 0.8 * rng.lognormal(0.0, 0.1, 5)), cell("b", times), 0.8, margin=0.05
        )
        covered += found.interval.low <= 0.8 <= found.interval.high
    assert covered >= 300 * 0.95 - 3 * math.sqrt(300 * 0.95 * 0.05)


def test_few_seeds_are_not_ranked_and_missed_goals_are_reported():
    few = compared(cell("a", [5.0] * 3), cell("b", [10.0] * 3), 0.8, margin=0.05)
    assert few.outcome == "not enough to rank"
    assert "3 pairs of seeds of at least 5" in few.text
    assert "the median seed took 10 seconds" in few.text
    never = Cell("a", (*cell("a", [5.0] * 4).curves, curve(4, 5.0, (0.2, 0.3, 0.4))))
    found = compared(never, cell("b", [10.0] * 5), 0.8, margin=0.05)
    assert (found.outcome, found.seeds) == ("not reached by all", 4)
    assert "(4 of 5 seeds reached 0.8)" in found.text
    assert math.isnan(found.ratio)
