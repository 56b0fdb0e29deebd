"""Compute the results of each cell from the journal: its row of the table, and the series for verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlflow.benchmarks.curves import Point
from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.suite import Goal


@dataclass(frozen=True)
class Row:
    """A cell's row of the table. Unknown numbers are None."""

    name: str
    key: str
    seeds: tuple[int, ...]  # finished seeds
    iterations: int  # number of iterations done, over all seeds
    seconds: float | None  # seconds of a timed iteration, median over turns
    # CPU seconds of an iteration, of all processes of the cell, median over turns
    processor: float | None
    tokens: float | None  # tokens sampled in an iteration, mean over timed iterations
    rate: float | None  # tokens sampled per second of timed iterations
    # bytes sent between processes per iteration, mean over the timed iterations that report them
    moved: float | None
    memory: int | None  # peak bytes of all the cell's processes together
    load: float | None  # load average of the machine at the start of its turns, median
    last: float | None  # last value of the goal's metric, mean over seeds
    outcomes: str  # outcomes of all sampled rows, in words
    closes: bool  # whether the sums of sampled rows and of their outcomes match
    failed: Mapping[int, str]  # seed → cause of its failure


def once(turns: list[Turn]) -> list[Turn]:
    """Return the turns without repeated iterations.

    A resumed run repeats some iterations. Only the first measurement of each iteration is kept.
    """
    counted: set[tuple[int, int]] = set()
    result = []
    for turn in turns:
        rows = [row for row in turn.iterations if (turn.seed, row["iteration"]) not in counted]
        counted |= {(turn.seed, row["iteration"]) for row in rows}
        known = {row["iteration"] for row in rows}
        result.append(
            Turn(
                turn.seed,
                turn.round,
                rows,
                turn.evaluations,
                turn.processor,
                turn.memory,
                turn.load,
                [number for number in turn.timed if number in known],
                turn.seconds,
            )
        )
    return result


def timed(turn: Turn) -> list[dict[str, float]]:
    """Return the timed iterations of a turn."""
    return [row for row in turn.iterations if row["iteration"] in turn.timed]


def block_seconds(measured: Measured) -> dict[tuple[int, int], float]:
    """Return the mean wall seconds of a timed iteration, by (seed, round)."""
    return {
        (turn.seed, turn.round): statistics.fmean(row["wall"] for row in rows)
        for turn in once(measured.turns)
        if (rows := timed(turn))
    }


def block_tokens(measured: Measured) -> dict[tuple[int, int], int]:
    """Return the number of tokens sampled in timed iterations, by (seed, round)."""
    return {
        (turn.seed, turn.round): int(sum(row["tokens"] for row in rows))
        for turn in once(measured.turns)
        if (rows := timed(turn))
    }


def curves(measured: Measured, goal: Goal) -> dict[int, list[Point]]:
    """Return the goal's metric for each seed as a curve over iterations, seconds and sampled tokens.

    The values come from evaluations or from iterations. The time of evaluations does not count.
    """
    series: dict[int, list[Point]] = {}
    for seed in sorted({turn.seed for turn in measured.turns}):
        turns = [turn for turn in once(measured.turns) if turn.seed == seed]
        spent: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        seconds, tokens, values = 0.0, 0, dict[int, float]()
        for row in sorted(
            (row for turn in turns for row in turn.iterations), key=lambda row: row["iteration"]
        ):
            seconds, tokens = seconds + row["wall"], tokens + row["tokens"]
            spent[row["iteration"] + 1] = seconds, tokens
            if goal.metric in row["metrics"]:
                values.setdefault(row["iteration"] + 1, row["metrics"][goal.metric])
        values = evaluated(turns, goal.metric) | values
        series[seed] = [
            Point(number, *spent[number], value)
            for number, value in sorted(values.items())
            if number in spent
        ]
    return series


def evaluated(turns: Iterable[Turn], metric: str) -> dict[int, float]:
    """Return the metric's value in evaluations, by number of finished iterations.

    If there are several evaluations after the same number of iterations, the first one counts.
    """
    values: dict[int, float] = {}
    for each in (each for turn in turns for each in turn.evaluations if metric in each["metrics"]):
        values.setdefault(each["iteration"], each["metrics"][metric])
    return values


def row(name: str, key: str, measured: Measured, goal: Goal) -> Row:
    """Compute a cell's row of the table from its measurements. ``key``: the key of its results."""
    turns = once(measured.turns)
    counted = [turn for turn in turns if timed(turn)]
    seconds = list(block_seconds(measured).values())
    rows = [one for turn in counted for one in timed(turn)]
    wall, tokens = sum(one["wall"] for one in rows), sum(one["tokens"] for one in rows)
    moved = [one["bytes"] for one in rows if "bytes" in one]
    last = [points[-1].value for points in curves(measured, goal).values() if points]
    outcomes = list(dict.fromkeys(values.get("fates", "") for values in measured.observed.values()))
    return Row(
        name,
        key,
        tuple(sorted(measured.done)),
        sum(len(turn.iterations) for turn in turns),
        statistics.median(seconds) if seconds else None,
        statistics.median(turn.processor / len(turn.iterations) for turn in counted) if counted else None,
        tokens / len(rows) if rows else None,
        tokens / wall if wall else None,
        statistics.fmean(moved) if moved else None,
        max((turn.memory for turn in turns), default=None),
        statistics.median(turn.load for turn in turns) if turns else None,
        statistics.fmean(last) if last else None,
        "\n".join(filter(None, outcomes)),
        all(values.get("closes", True) for values in measured.observed.values()),
        dict(measured.failed),
    )
