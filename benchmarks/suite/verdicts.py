"""The verdicts of a comparison.

There are verdicts on speed if cells did the same work, and on learning if cells have enough seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.benchmarks.curves import By, Cell, Curve, area, horizon
from rlflow.benchmarks.journal import Measured
from rlflow.benchmarks.learning import profile_text, ranked_all
from rlflow.benchmarks.results import block_seconds, block_tokens, curves
from rlflow.benchmarks.sooner import compared
from rlflow.benchmarks.speed import Block, Looks, Speed, compare_speeds, finished
from rlflow.benchmarks.suite import Suite

# (name, measurements) of each cell, the base first
Cells = Sequence[tuple[str, Measured]]
SHOWN = "shown"  # outcome of numbers that are shown without a test
# number of a block's round: seed × this number + round, so that the rounds of different seeds differ
ROUNDS_OF_A_SEED = 1_000_000


@dataclass(frozen=True)
class Verdict:
    """One result of comparing a cell with the base."""

    cell: str
    base: str
    what: str  # compared quantity: speed, or the goal's metric
    outcome: str  # the outcome in a word or two, for programs
    text: str  # the outcome as a sentence


def looks(suite: Suite) -> Looks:
    """Return the looks of a suite. A cell's first turn is not timed, and does not count as a round."""
    rounds = suite.settings.rounds
    return Looks(maximum=max(rounds - 1, 3)) if rounds is not None else Looks()


def blocks(measured: Measured) -> list[Block]:
    """Return the timed turns of a cell as blocks."""
    return [
        Block(seed * ROUNDS_OF_A_SEED + number, seconds)
        for (seed, number), seconds in sorted(block_seconds(measured).items())
    ]


def speeds(suite: Suite, cells: Cells) -> tuple[Speed, ...]:
    """Compare the speed of each cell with the base, without checking whether they did the same work."""
    return compare_speeds(
        {name: blocks(measured) for name, measured in cells},
        cells[0][0],
        margin=suite.goal.margin,
        looks=looks(suite),
    )


def decided(suite: Suite, cells: Cells) -> bool:
    """Return whether all verdicts on speed are final.

    Failed cells are ignored, but they keep their part of the error probability.
    """
    alive = {name: measured for name, measured in cells if not measured.failed}
    if len(alive) < 2 or cells[0][0] not in alive:
        return False
    pairs = [speed for speed in speeds(suite, cells) if speed.cell in alive]
    rounds = min(len(block_seconds(measured)) for measured in alive.values())
    if not rounds:  # cells without a timed turn are not comparable yet, but this is not a final verdict
        return False
    return finished(pairs, rounds, looks(suite))


def other_work(base: Measured, measured: Measured) -> str:
    """Return a string that says how the sampled tokens of two cells differ in common rounds; empty if they
    are equal.
    """
    one, other = block_tokens(base), block_tokens(measured)
    both = sorted(set(one) & set(other))
    different = [number for number in both if one[number] != other[number]]
    if not different:
        return ""
    means = [sum(counts[number] for number in both) / len(both) for counts in (other, one)]
    return f"{means[0]:.0f} tokens per turn vs {means[1]:.0f}"


def verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """Return all verdicts on each cell compared with the base.

    Verdicts on speed come before verdicts on learning.
    """
    return [*speed_verdicts(suite, cells), *learning_verdicts(suite, cells)]


def speed_verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """Return the verdicts on speed. If cells did different work, the verdict is "not the same work"."""
    measured: Mapping[str, Measured] = dict(cells)
    result = []
    for speed in speeds(suite, cells):
        difference = other_work(measured[speed.base], measured[speed.cell])
        if difference and speed.outcome != "not comparable":
            text = f"not the same work, {difference}: only the time to the goal can be compared"
            result.append(Verdict(speed.cell, speed.base, "speed", "not the same work", text))
        else:
            result.append(Verdict(speed.cell, speed.base, "speed", speed.outcome, speed.text))
    return result


def learning(suite: Suite, name: str, measured: Measured) -> Cell:
    """Return the learning curves of a cell's finished seeds."""
    known = curves(measured, suite.goal)
    return Cell(
        name, tuple(Curve(seed, tuple(known[seed])) for seed in sorted(measured.done) if known.get(seed))
    )


def learning_verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """Compare the learning of each cell with the base.

    There are verdicts on final values, on areas under the curves and, if the suite has a goal, on the time to
    the goal. Cells without a value of the goal's metric get no verdicts.
    """
    series = [learning(suite, name, measured) for name, measured in cells]
    base, goal = series[0], suite.goal
    rankings = {ranking.cell: ranking for ranking in ranked_all(series[1:], base, margin=goal.margin)}
    result = []
    for cell in series[1:]:
        if not cell.curves or not base.curves:
            continue
        ranking = rankings[cell.name]
        result.append(Verdict(cell.name, base.name, goal.metric, ranking.outcome, ranking.text))
        result.append(Verdict(cell.name, base.name, "seeds above a value", SHOWN, profile_text(cell, base)))
        result.append(Verdict(cell.name, base.name, "area under the curve", SHOWN, areas(cell, base)))
        if goal.reach is not None:
            sooner = compared(cell, base, goal.reach, margin=goal.margin, pairs=len(series) - 1)
            result.append(
                Verdict(cell.name, base.name, f"time to {goal.reach:g}", sooner.outcome, sooner.text)
            )
    return result


def areas(cell: Cell, base: Cell) -> str:
    """Return the mean areas under the curves of two cells as text, over seconds and over tokens.

    All areas end where the shortest curve ends.
    """
    parts = []
    units: dict[By, str] = {"seconds": "s", "tokens": "tokens"}
    for by, unit in units.items():
        end = horizon((cell, base), by)
        means = [
            sum(area(curve, end, by=by) for curve in each.curves) / len(each.curves) for each in (cell, base)
        ]
        parts.append(f"{means[0]:.3f} vs {means[1]:.3f} over {end:,.0f} {unit}")
    return ", ".join(parts)
