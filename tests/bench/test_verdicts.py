"""Verdicts: never faster where the work differs, decided only by rounds that are timed."""

import random

import pytest

from rlflow.bench.journal import Measured, Turn
from rlflow.bench.suite import Cell, Goal, Settings, Suite
from rlflow.bench.verdicts import decided, other_work, verdicts

CELLS = tuple(Cell(name, "rlflow", "grpo", {}) for name in ("base", "other"))


def suite(**settings):
    return Suite("mine", Settings(**settings), Goal(), (), CELLS)


def measured(seconds, rounds, tokens=100, seed=0, noise=0.01):
    draw = random.Random(seed)
    turns = []
    for number in range(rounds):
        rows = [{"iteration": 2 * number + i, "wall": seconds * (1 + noise * draw.gauss(0, 1)), "tokens": tokens, "metrics": {}}
                for i in range(2)]
        turns.append(Turn(0, number, rows, [], 1.0, 1, 0.1, [2 * number + 1] if number else []))
    return Measured(turns)


@pytest.mark.parametrize(("seconds", "outcome"), [(0.8, "faster"), (1.25, "slower"), (1.0, "same within the margin")])
def test_cells_that_did_the_same_work_are_told_apart_by_their_seconds(seconds, outcome):
    cells = [("base", measured(1.0, 20, seed=1)), ("other", measured(seconds, 20, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert (verdict.cell, verdict.base, verdict.what, verdict.outcome) == ("other", "base", "speed", outcome)
    assert decided(suite(rounds=20), cells)


def test_a_cell_that_did_other_work_is_never_faster():
    cells = [("base", measured(1.0, 20, seed=1)), ("other", measured(0.5, 20, tokens=90, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert verdict.outcome == "not the same work"
    assert "90 tokens a turn beside 100" in verdict.text
    assert "time to the goal" in verdict.text


def test_few_rounds_decide_nothing_and_say_how_many_more():
    cells = [("base", measured(1.0, 4, seed=1)), ("other", measured(0.8, 4, seed=2))]
    [verdict] = verdicts(suite(rounds=20), cells)
    assert verdict.outcome == "undecided"
    assert "more rounds" in verdict.text
    assert not decided(suite(rounds=20), cells)


def test_a_cell_that_failed_is_not_waited_for():
    failed = measured(1.0, 1)
    failed.failed[0] = "it does not work"
    base = ("base", measured(1.0, 20, seed=1))
    assert not decided(suite(rounds=30), [base, ("other", failed)]), "with nothing to compare the base runs on"
    assert decided(suite(rounds=30), [base, ("other", failed), ("third", measured(0.7, 20, seed=3))])


def test_work_is_compared_in_the_rounds_that_both_have():
    assert other_work(measured(1.0, 4), measured(1.0, 9)) == ""
    assert other_work(measured(1.0, 4), measured(1.0, 9, tokens=7)) == "7 tokens a turn beside 100"
