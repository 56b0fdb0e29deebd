"""Areas under learning curves and the time to a goal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.curves import Cell, Curve, Point, area, horizon, kaplan_meier_median, time_to_goal

LINE = Curve(0, (Point(0, 0, 0, 0.0), Point(1, 10, 100, 1.0)))
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


def curve(values, seed=0):
    return Curve(
        seed, tuple(Point(number, 2.0 * number, 10.0 * number, value) for number, value in enumerate(values))
    )


def test_an_area_is_the_mean_height_until_the_horizon():
    assert area(LINE, 10) == 0.5
    assert area(LINE, 5) == 0.25
    assert area(LINE, 20) == 0.75  # the curve is flat after its end
    assert area(LINE, 50, by="tokens") == 0.25
    assert area(LINE, 10, low=-1, high=1) == 0.75
    assert area(LINE, 0) == 0
    assert area(Curve(0, (Point(3, 6, 6, 0.4),)), 10) == pytest.approx(0.4)


@given(VALUES, st.floats(0.1, 40))
def test_an_area_is_between_the_extremes_in_any_point_order(values, end):
    points = curve(values).points
    found = area(curve(values), end)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6
    assert area(Curve(0, points[::-1]), end) == found
    assert area(curve([value + 1 for value in values]), end) == pytest.approx(found + 1, abs=1e-6)


def test_the_horizon_is_the_end_of_the_shortest_curve():
    cells = [Cell("a", (curve([0, 0, 0]), curve([0, 0]))), Cell("b", (curve([0] * 9), Curve(3, ())))]
    assert (horizon(cells), horizon(cells, "tokens"), horizon([])) == (2, 10, 0)


def test_half_of_the_seeds_reach_the_goal_by_the_median():
    cell = Cell(
        "a", tuple(curve(values, seed) for seed, values in enumerate([[0, 1, 1], [0, 0, 1], [0, 0, 0]]))
    )
    found = time_to_goal(cell, 1.0)
    assert (found.median, found.reached, found.seeds) == (4, 2, 3)
    assert found.text == "the median seed took 4 seconds (2 of 3 seeds reached 1)"
    assert time_to_goal(cell, 1.0, by="tokens").median == 20
    assert time_to_goal(cell, 0.0, higher=False).median == 0


def test_a_goal_not_reached_by_the_median_seed_is_reported():
    found = time_to_goal(Cell("a", (curve([0, 1]), curve([0, 0, 0]), curve([0, 0]))), 1.0)
    assert found.median is None
    assert found.text == "not reached by the median seed within 4 seconds (1 of 3 seeds reached 1)"
    assert time_to_goal(Cell("a", ()), 1.0).median is None


def test_the_median_is_kaplan_and_meiers():
    """Remission times of Freireich et al. (1963), from textbooks: medians of 23 weeks (treated) and 8 weeks."""
    treated = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    events = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    placebo = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
    assert kaplan_meier_median(treated, [bool(event) for event in events]) == 23
    assert kaplan_meier_median(placebo, [True] * 21) == 8
    assert kaplan_meier_median([1, 2], [False, False]) is None


@given(VALUES, VALUES, st.floats(-1e6, 1e6))
def test_a_lower_goal_is_reached_no_later(first, second, goal):
    cell = Cell("a", (curve(first), curve(second)))
    high, low = time_to_goal(cell, goal), time_to_goal(cell, goal - 1)
    assert high.median is None or (low.median is not None and low.median <= high.median)
