"""What a comparison may say: speed only where the same work was done, learning only from as many seeds as can
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.benchmarks.curves import By, Cell, Curve, area, horizon
from rlflow.benchmarks.journal import Measured
from rlflow.benchmarks.learning import profile_text, ranked_all
from rlflow.benchmarks.results import block_seconds, block_tokens, curves
from rlflow.benchmarks.sooner import compared
from rlflow.benchmarks.speed import Block, Looks, Speed, finished, judged
from rlflow.benchmarks.suite import Suite

# name and what was measured, the one that others are compared with first
Cells = Sequence[tuple[str, Measured]]
SHOWN = "shown"  # the outcome of numbers that decide nothing
ROUNDS_OF_A_SEED = 1_000_000  # a round's number is that of its seed times this, plus its own


@dataclass(frozen=True)
class Verdict:
    """A sentence on what the numbers say of a cell beside the base."""

    cell: str
    base: str
    what: str  # that is compared: speed, or the goal's metric
    outcome: str  # in a word or two, for programs
    text: str


def looks(suite: Suite) -> Looks:
    """The rounds after which verdicts of speed are looked at, declared before the first. The first turn of a
    cell is not timed."""
    rounds = suite.settings.rounds
    return Looks(maximum=max(rounds - 1, 3)) if rounds is not None else Looks()


def blocks(measured: Measured) -> list[Block]:
    """The timed turns of a cell."""
    return [
        Block(seed * ROUNDS_OF_A_SEED + number, seconds)
        for (seed, number), seconds in sorted(block_seconds(measured).items())
    ]


def speeds(suite: Suite, cells: Cells) -> tuple[Speed, ...]:
    """The speed of each cell beside the base, whatever work they did."""
    return judged(
        {name: blocks(measured) for name, measured in cells},
        cells[0][0],
        margin=suite.goal.margin,
        looks=looks(suite),
    )


def decided(suite: Suite, cells: Cells) -> bool:
    """Whether more rounds would change no verdict of speed. A cell that failed is waited for no longer, but
    has its part of the error."""
    alive = {name: measured for name, measured in cells if not measured.failed}
    if len(alive) < 2 or cells[0][0] not in alive:
        return False
    pairs = [speed for speed in speeds(suite, cells) if speed.cell in alive]
    rounds = min(len(block_seconds(measured)) for measured in alive.values())
    if not rounds:  # cells without a timed turn are not comparable yet, which is no verdict
        return False
    return finished(pairs, rounds, looks(suite))


def other_work(base: Measured, measured: Measured) -> str:
    """How the tokens of two cells differ in the rounds that both have; empty where they are equal."""
    one, other = block_tokens(base), block_tokens(measured)
    both = sorted(set(one) & set(other))
    different = [number for number in both if one[number] != other[number]]
    if not different:
        return ""
    means = [sum(counts[number] for number in both) / len(both) for counts in (other, one)]
    return f"{means[0]:.0f} tokens a turn beside {means[1]:.0f}"


def verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """All that can be said of each cell beside the base: speed, then learning."""
    return [*speed_verdicts(suite, cells), *learning_verdicts(suite, cells)]


def speed_verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """Speed of cells that did the same work; of others that they did not, and that time to the goal is to be
    compared."""
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
    """The curves of the seeds that came to their end."""
    known = curves(measured, suite.goal)
    return Cell(
        name, tuple(Curve(seed, tuple(known[seed])) for seed in sorted(measured.done) if known.get(seed))
    )


def learning_verdicts(suite: Suite, cells: Cells) -> list[Verdict]:
    """Judge how each cell learns beside the base: the last values, the areas under the curves, and the time
    to the goal where the suite names one. Nothing where no seed has a value of the goal's metric."""
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
    """The mean areas of two cells until the shortest of their curves ends, over seconds and over tokens."""
    parts = []
    units: dict[By, str] = {"seconds": "s", "tokens": "tokens"}
    for by, unit in units.items():
        end = horizon((cell, base), by)
        means = [
            sum(area(curve, end, by=by) for curve in each.curves) / len(each.curves) for each in (cell, base)
        ]
        parts.append(f"{means[0]:.3f} beside {means[1]:.3f} over {end:,.0f} {unit}")
    return ", ".join(parts)
