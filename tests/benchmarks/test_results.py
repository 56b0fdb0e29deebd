"""The numbers of a cell: repeated iterations count once, and untimed iterations do not count in seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.curves import Point
from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.results import block_seconds, block_tokens, curves, once
from rlflow.benchmarks.suite import Goal


def turn(number, iterations, timed=None, seed=0, sandboxes=1.0, evaluations=()):
    rows = [
        {"iteration": i, "wall": sandboxes, "tokens": 10 * (i + 1), "metrics": {"reward/mean": i / 10}}
        for i in iterations
    ]
    return Turn(
        seed,
        number,
        rows,
        [{"iteration": i, "metrics": {"evaluation/sampled": v}} for i, v in evaluations],
        2.0,
        100,
        0.5,
        list(iterations) if timed is None else timed,
    )


def test_block_seconds_are_of_timed_iterations():
    measured = Measured([turn(0, range(3), timed=[]), turn(1, range(3, 6), timed=[4, 5], sandboxes=2.0)])
    assert block_seconds(measured) == {(0, 1): 2.0}
    assert block_tokens(measured) == {(0, 1): 50 + 60}


def test_a_curve_has_seconds_and_tokens_spent_before_each_value():
    measured = Measured(
        [
            turn(0, range(2), evaluations=[(0, 0.1)]),
            turn(1, range(2, 4), sandboxes=3.0, evaluations=[(2, 0.4), (4, 0.6)]),
        ]
    )
    assert curves(measured, Goal()) == {
        0: [Point(0, 0.0, 0, 0.1), Point(2, 2.0, 30, 0.4), Point(4, 8.0, 100, 0.6)]
    }
    assert [point.value for point in curves(measured, Goal(metric="reward/mean"))[0]] == [0.0, 0.1, 0.2, 0.3]


@given(cuts=st.lists(st.integers(0, 20), max_size=6), block=st.integers(1, 5))
def test_repeated_iterations_count_once(cuts, block):
    turns, number = [], 0
    for cut in [*cuts, 20]:
        start = min(number, cut)  # the checkpoint from which the run resumed
        for first in range(start, 21, block):
            turns.append(
                turn(len(turns), range(first, min(first + block, 21)), evaluations=[(first, first / 30)])
            )
            number = first
            if first >= cut:
                break
    rows = [row["iteration"] for each in once(turns) for row in each.iterations]
    assert len(rows) == len(set(rows))
    assert set(rows) == {row["iteration"] for each in turns for row in each.iterations}
    points = curves(Measured(turns), Goal())[0]
    assert [point.iteration for point in points] == sorted({point.iteration for point in points})
    assert points[-1].seconds == pytest.approx(points[-1].iteration)
