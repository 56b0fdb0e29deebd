"""Charts of curves in characters."""

from hypothesis import given
from hypothesis import strategies as st

from rlflow.monitoring.chart import chart, mark

CURVE = st.dictionaries(st.integers(0, 500), st.floats(-1e6, 1e6), max_size=30).map(
    lambda points: sorted(points.items())
)
PICTURE = """\
  1 ┤         ·A
    │       ··
0.5 ┤    ··· ··B
    │  ······
  0 ┤*··
    └───────────
     0        10"""


def test_two_curves_share_axes_and_meet_in_a_star():
    assert chart({"A": [(0, 0.0), (10, 1.0)], "B": [(0, 0.0), (10, 0.5)]}, 16, 5).plain == PICTURE


@given(st.dictionaries(st.sampled_from("ABC"), CURVE), st.integers(20, 140), st.integers(1, 12))
def test_a_chart_fills_its_size_and_shows_each_curve(curves, width, height):
    lines = chart(curves, width, height).plain.splitlines()
    assert all(len(line) <= max(width, 24) for line in lines)
    shown = {name for name, points in curves.items() if points}
    assert (len(lines) == height + 2) if shown else lines == []
    body = "".join(lines[:height])
    assert {name for name in shown if name not in body} == set() or "*" in body


def test_curves_have_letters_and_then_question_marks():
    assert (mark(0), mark(25), mark(26), mark(51), mark(52)) == ("A", "Z", "a", "z", "?")


def test_a_constant_curve_is_a_line_at_its_value():
    lines = chart({"•": [(1, 0.5), (4, 0.5)]}, 30, 3).plain.splitlines()
    assert lines[2].startswith("0.5 ┤•····")
    assert lines[:2] == ["    │", "    │"]
