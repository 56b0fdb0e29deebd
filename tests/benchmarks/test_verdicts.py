"""Verdicts: a cell with different work is never faster, and only timed rounds decide."""

import random

import pytest

from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.suite import Cell, Goal, Settings, Suite
from rlflow.benchmarks.verdicts import decided, other_work, verdicts

CELLS = tuple(Cell(name, "rlflow", "grpo", {}) for name in ("base", "other"))


def suite(**settings):
    return Suite("mine", Settings(**settings), Goal(), (), CELLS)


def measured(seconds, rounds, tokens=100, seed=0, noise=0.01):
    draw = random.Random(seed)
    turns = []
    for number in range(rounds):
        rows = [
            {
                "iteration": 2 * number + i,
                "wall": seconds * (1 + noise * draw.gauss(0, 1)),
                "tokens": tokens,
                "metrics": {},
            }
            for i in range(2)
        ]
        turns.append(Turn(0, number, rows, [], 1.0, 1, 0.1, [2 * number + 1] if number else []))
    return Measured(turns)


@pytest.mark.parametrize(
    ("seconds", "outcome"), [(0.8, "faster"), (1.25, "slower"), (1.0, "same within the margin")]
)
def test_cells_with_equal_work_are_compared_by_seconds(seconds, outcome):
    cells = [("base", measured(1.0, 20, seed=1)), ("other", measured(seconds, 20, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert (verdict.cell, verdict.base, verdict.what, verdict.outcome) == ("other", "base", "speed", outcome)
    assert decided(suite(rounds=20), cells)


def test_a_cell_with_different_work_is_never_faster():
    cells = [("base", measured(1.0, 20, seed=1)), ("other", measured(0.5, 20, tokens=90, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert verdict.outcome == "not the same work"
    assert "90 tokens per turn vs 100" in verdict.text
    assert "time to the goal" in verdict.text


def test_few_rounds_decide_nothing_and_forecast_more():
    cells = [("base", measured(1.0, 4, seed=1)), ("other", measured(0.8, 4, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert verdict.outcome == "undecided"
    assert "more rounds" in verdict.text
    assert not decided(suite(rounds=20), cells)


def test_nothing_is_decided_before_every_cell_has_a_timed_turn():
    base, warm = ("base", measured(1.0, 20, seed=1)), measured(1.0, 1)
    assert not decided(suite(rounds=20), [("base", Measured()), ("other", Measured())])
    assert not decided(suite(rounds=20), [base, ("other", warm)])


def test_a_failed_cell_does_not_delay_the_end():
    failed = measured(1.0, 1)
    failed.failed[0] = "it does not work"
    base = ("base", measured(1.0, 20, seed=1))
    assert not decided(suite(rounds=30), [base, ("other", failed)]), (
        "with nothing to compare the base runs on"
    )
    assert decided(suite(rounds=30), [base, ("other", failed), ("third", measured(0.7, 20, seed=3))])


def test_work_is_compared_in_common_rounds():
    assert other_work(measured(1.0, 4), measured(1.0, 9)) == ""
    assert other_work(measured(1.0, 4), measured(1.0, 9, tokens=7)) == "7 tokens per turn vs 100"


def learned(values, seeds=5, step=1.0):
    """Return measurements of seeds whose evaluations have these values plus a small difference by seed."""
    turns = []
    for seed in range(seeds):
        rows = [{"iteration": i, "wall": step, "tokens": 10, "metrics": {}} for i in range(len(values) - 1)]
        evaluations = [
            {"iteration": i, "metrics": {"evaluation/sampled": value + 0.001 * seed}}
            for i, value in enumerate(values)
        ]
        turns.append(Turn(seed, 0, rows, evaluations, 1.0, 1, 0.1, []))
    return Measured(turns, done=set(range(seeds)))


def what(cells, **goal):
    mine = Suite("mine", Settings(), Goal(**goal), (), CELLS)
    return {verdict.what: verdict for verdict in verdicts(mine, cells) if verdict.what != "speed"}


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.1, 0.5, 0.9], "better"),
        ([0.1, 0.2, 0.3], "worse"),
        ([0.1, 0.3, 0.601], "equivalent within the margin"),
    ],
)
def test_learning_is_compared_by_last_values_of_all_seeds(values, outcome):
    found = what([("base", learned([0.1, 0.3, 0.6])), ("other", learned(values))], margin=0.05)
    assert found["evaluation/sampled"].outcome == outcome


def test_verdicts_need_five_seeds():
    found = what([("base", learned([0.1, 0.3], seeds=4)), ("other", learned([0.1, 0.9], seeds=4))])
    assert found["evaluation/sampled"].outcome == "not enough to rank"


def test_an_unfinished_seed_does_not_count():
    other = learned([0.1, 0.9], seeds=5)
    other.done.discard(3)
    assert (
        what([("base", learned([0.1, 0.3])), ("other", other)])["evaluation/sampled"].outcome
        == "not enough to rank"
    )


def test_the_time_to_the_goal_excludes_evaluations():
    cells = [("base", learned([0.1, 0.3, 0.6], step=2.0)), ("other", learned([0.1, 0.2, 0.3]))]
    found = what(cells, reach=0.5)["time to 0.5"]
    assert "base: the median seed took 4 seconds (5 of 5 seeds reached 0.5)" in found.text
    assert "other: not reached by the median seed within 2 seconds" in found.text
    assert found.outcome == "not reached by all"
    cells[1] = ("other", learned([0.1, 0.3, 0.6], step=1.0))
    assert what(cells, reach=0.5)["time to 0.5"].text.startswith("sooner; 0.5 times the seconds")


def test_areas_end_with_the_shortest_curve():
    cells = [("base", learned([0.0, 1.0, 1.0])), ("other", learned([0.0, 1.0]))]
    assert what(cells)["area under the curve"].text.startswith("0.502 vs 0.502 over 1 s")


def test_cells_without_the_metric_have_no_learning_verdict():
    assert what([("base", learned([0.1, 0.3])), ("other", measured(1.0, 3))]) == {}
