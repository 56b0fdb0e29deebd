"""The table of seeds with evaluations and seconds, and the learning curve of each cell as mean over seeds."""

from rlflow.benchmarks.by_seed import curve_rows, curve_table, heads, seed_rows, texts
from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.suite import Goal


def turn(seed, number, iterations, evaluations, seconds):
    rows = [{"iteration": i, "wall": 2.0, "tokens": 10, "metrics": {}} for i in iterations]
    return Turn(
        seed,
        number,
        rows,
        [{"iteration": i, "metrics": metrics} for i, metrics in evaluations.items()],
        1.0,
        1,
        0.0,
        [],
        seconds,
    )


def both(sampled, greedy=None):
    return {"evaluation/sampled": sampled} | ({"evaluation/greedy": greedy} if greedy is not None else {})


ONE = Measured(
    [
        turn(0, 0, range(3), {0: both(0.436, 0.486), 2: both(0.5, 0.6)}, 7.5),
        turn(1, 0, range(3), {0: both(0.4, 0.5)}, 6.0),
        turn(0, 1, range(2, 5), {2: both(0.9, 0.9), 5: both(0.926, 0.98)}, 8.0),
        turn(1, 1, [3, 4], {5: both(0.8, 0.7)}, 4.0),
    ],
    starts={0: 3.0, 1: 2.5},
)
OTHER = Measured([turn(0, 0, range(5), {0: both(0.2), 5: both(0.3)}, 9.0)])
NONE = Measured([turn(0, 0, range(5), {}, 9.0)])


def test_a_seed_row_has_first_and_last_evaluation_and_all_seconds():
    rows = seed_rows([("one", ONE), ("other", OTHER), ("none", NONE)], Goal())
    assert heads(rows, Goal()) == (
        "cell",
        "seed",
        "sampled before → after",
        "greedy before → after",
        "iterations",
        "iteration seconds",
        "process seconds",
    )
    assert [texts(row, Goal(), rows) for row in rows] == [
        # iteration 2 ran twice and counts once
        ("one", "0", "43.6% → 92.6%", "48.6% → 98.0%", "5", "10 s", "18 s"),
        ("one", "1", "40.0% → 80.0%", "50.0% → 70.0%", "5", "10 s", "12 s"),
        ("other", "0", "20.0% → 30.0%", "", "5", "10 s", "9 s"),
    ]


def test_a_curve_with_more_than_two_points_is_the_mean_over_seeds():
    rows = curve_rows([("one", ONE), ("other", OTHER), ("none", NONE)], Goal())
    assert curve_table(rows, Goal()) == [
        ("sampled after iterations", "0", "2", "5"),
        ("one", "41.8%", "50.0%", "86.3%"),
    ]
    assert curve_table([], Goal()) == []


def test_another_goal_metric_has_one_column():
    cell = Measured(
        [
            turn(
                0,
                0,
                range(2),
                {0: {"evaluation/held/greedy": 0.25}, 2: {"evaluation/held/greedy": 0.5, "pairs": 3.0}},
                1.0,
            )
        ]
    )
    rows = seed_rows([("one", cell)], Goal(metric="evaluation/held/greedy"))
    assert texts(rows[0], Goal(metric="evaluation/held/greedy"), rows)[2] == "25.0% → 50.0%"
    (pairs,) = seed_rows([("one", cell)], Goal(metric="pairs"))
    assert texts(pairs, Goal(metric="pairs"), [pairs])[2] == "3 → 3"
