"""The numbers of each cell, from what was recorded: a row of the table, and the series from which verdicts
are made."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlflow.benchmarks.curves import Point
from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.suite import Goal


@dataclass(frozen=True)
class Row:
    """A cell in numbers; None where there is nothing to say."""

    name: str
    key: str
    seeds: tuple[int, ...]  # that came to their end
    iterations: int  # that were done, over all seeds
    seconds: float | None  # of an iteration that is timed: the median of turns
    # seconds of processor time of an iteration, of all its processes: the median of turns
    processor: float | None
    tokens: float | None  # that an iteration sampled, the mean of those that are timed
    rate: float | None  # tokens sampled per second of those iterations
    # bytes that went from process to process in an iteration, the mean of those that are timed and say it
    moved: float | None
    memory: int | None  # the most bytes of its processes together
    load: float | None  # of the machine at the beginning of its turns, the median
    last: float | None  # the last value of the goal's metric, the mean over seeds
    fates: str  # of everything that was sampled, in words
    closes: bool  # whether those sums close
    failed: Mapping[int, str]  # seed → cause


def once(turns: list[Turn]) -> list[Turn]:
    """The turns with every iteration as it was measured first: a run that was killed does some again."""
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
    """The iterations of a turn whose seconds count."""
    return [row for row in turn.iterations if row["iteration"] in turn.timed]


def block_seconds(measured: Measured) -> dict[tuple[int, int], float]:
    """(seed, round) → mean wall seconds of an iteration."""
    return {
        (turn.seed, turn.round): statistics.fmean(row["wall"] for row in rows)
        for turn in once(measured.turns)
        if (rows := timed(turn))
    }


def block_tokens(measured: Measured) -> dict[tuple[int, int], int]:
    """(seed, round) → tokens that were sampled in the iterations that are timed."""
    return {
        (turn.seed, turn.round): int(sum(row["tokens"] for row in rows))
        for turn in once(measured.turns)
        if (rows := timed(turn))
    }


def curves(measured: Measured, goal: Goal) -> dict[int, list[Point]]:
    """Seed → the values of the goal's metric, of evaluations or of iterations, with the seconds and sampled
    tokens that had been spent until then; evaluations take none."""
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
    """Iterations done → the metric's value in the evaluation after them; of several the first."""
    values: dict[int, float] = {}
    for each in (each for turn in turns for each in turn.evaluations if metric in each["metrics"]):
        values.setdefault(each["iteration"], each["metrics"][metric])
    return values


def row(name: str, key: str, measured: Measured, goal: Goal) -> Row:
    """A cell in numbers. ``key``: of its results."""
    turns = once(measured.turns)
    counted = [turn for turn in turns if timed(turn)]
    seconds = list(block_seconds(measured).values())
    rows = [one for turn in counted for one in timed(turn)]
    wall, tokens = sum(one["wall"] for one in rows), sum(one["tokens"] for one in rows)
    moved = [one["bytes"] for one in rows if "bytes" in one]
    last = [points[-1].value for points in curves(measured, goal).values() if points]
    fates = list(dict.fromkeys(values.get("fates", "") for values in measured.observed.values()))
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
        "\n".join(filter(None, fates)),
        all(values.get("closes", True) for values in measured.observed.values()),
        dict(measured.failed),
    )
