"""Tables about the seeds of each cell: the first and last evaluation, the iterations and the seconds.

Cells without evaluations have no rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlflow.benchmarks.journal import Measured
from rlflow.benchmarks.results import evaluated, once
from rlflow.benchmarks.suite import Goal

FIGURES = ("sampled", "greedy")  # the two figures of one evaluation


@dataclass(frozen=True)
class SeedRow:
    """A row in the table of seeds: one seed of a cell."""

    cell: str
    seed: int
    # metric → its first and last evaluated value
    values: Mapping[str, tuple[float, float]]
    iterations: int
    seconds: float  # seconds of the iterations, without evaluations
    # seconds of the cell's own process: starts, turns and evaluations, without the turns of other cells
    whole: float


@dataclass(frozen=True)
class CurveRow:
    """The learning curve of a cell: the goal's metric by number of finished iterations, averaged
    over seeds.
    """

    cell: str
    values: Mapping[int, float]


def shown_metrics(goal: Goal) -> tuple[str, ...]:
    """Return the names of the metrics in the table of seeds.

    The table shows the goal's metric. If this is the sampled or the greedy accuracy, the table shows both
    accuracies.
    """
    of, _, figure = goal.metric.rpartition("/")
    return tuple(f"{of}/{each}" for each in FIGURES) if of and figure in FIGURES else (goal.metric,)


def seed_rows(cells: Iterable[tuple[str, Measured]], goal: Goal) -> list[SeedRow]:
    """Return a row for each seed that has evaluations. ``cells``: (name, measurements) of each cell."""
    return [
        row
        for name, measured in cells
        for seed in sorted({turn.seed for turn in measured.turns})
        if (row := _row(name, seed, measured, goal)).values
    ]


def _row(name: str, seed: int, measured: Measured, goal: Goal) -> SeedRow:
    turns = [turn for turn in once(measured.turns) if turn.seed == seed]
    series = {metric: evaluated(turns, metric) for metric in shown_metrics(goal)}
    ends = {metric: (values[min(values)], values[max(values)]) for metric, values in series.items() if values}
    sandboxes = [row["wall"] for turn in turns for row in turn.iterations]
    whole = measured.starts.get(seed, 0.0) + sum(turn.seconds for turn in turns)
    return SeedRow(name, seed, ends, len(sandboxes), sum(sandboxes), whole)


def curve_rows(cells: Iterable[tuple[str, Measured]], goal: Goal) -> list[CurveRow]:
    """Return the learning curve of each cell with evaluations at more than two points."""
    rows = []
    for name, measured in cells:
        turns = once(measured.turns)
        series = [
            evaluated([turn for turn in turns if turn.seed == seed], goal.metric)
            for seed in {turn.seed for turn in turns}
        ]
        numbers = sorted({number for values in series for number in values})
        means = {
            number: statistics.fmean(values[number] for values in series if number in values)
            for number in numbers
        }
        rows += [CurveRow(name, means)] if len(means) > 2 else []
    return rows


def heads(rows: Sequence[SeedRow], goal: Goal) -> tuple[str, ...]:
    """Return the column heads of the table of seeds."""
    metrics = [metric for metric in shown_metrics(goal) if any(metric in row.values for row in rows)]
    named = (metric.removeprefix("evaluation/") for metric in metrics)
    return (
        "cell",
        "seed",
        *(f"{name} before → after" for name in named),
        "iterations",
        "iteration seconds",
        "process seconds",
    )


def texts(row: SeedRow, goal: Goal, among: Sequence[SeedRow]) -> tuple[str, ...]:
    """Return one row of the table of seeds as strings. ``among``: all rows, which determine the columns."""
    metrics = [metric for metric in shown_metrics(goal) if any(metric in each.values for each in among)]
    ends = [
        " → ".join(value_text(metric, value) for value in row.values[metric]) if metric in row.values else ""
        for metric in metrics
    ]
    return (row.cell, str(row.seed), *ends, str(row.iterations), f"{row.seconds:.0f} s", f"{row.whole:.0f} s")


def value_text(metric: str, value: float) -> str:
    """Return a metric's value as text. Values from evaluations are percentages."""
    return f"{value:.1%}" if metric.startswith("evaluation/") else f"{value:.4g}"


def curve_table(rows: Sequence[CurveRow], goal: Goal) -> list[tuple[str, ...]]:
    """Return the table of learning curves: a header with the iterations, then a line for each cell."""
    numbers = sorted({number for row in rows for number in row.values})
    lines = [
        (
            row.cell,
            *(
                value_text(goal.metric, row.values[number]) if number in row.values else ""
                for number in numbers
            ),
        )
        for row in rows
    ]
    return (
        [(f"{goal.metric.removeprefix('evaluation/')} after iterations", *map(str, numbers)), *lines]
        if rows
        else []
    )
