"""Test which cell is faster, from blocks of seconds that were recorded in rounds.

In each round every cell runs one block, and the order rotates. A disturbance of the machine therefore affects
all cells. The bootstrap resamples complete rounds. The statistic is the ratio of the medians of two cells,
because a few slow blocks do not change a median.

**Looks.** Rounds are added until all pairs are decided. If a 95 % interval were tested after every round, the
test would sooner or later find a difference between equal cells. Looks are therefore declared before the
first round (`Looks`), and each look gets an equal part of the error probability. The sum bounds the total
error, however the looks depend on each other (Bonferroni; error spending: Lan and DeMets, "Discrete
sequential boundaries for clinical trials", Biometrika 70, 1983). A pair keeps the verdict of the look that
decided it.

**Pairs.** Holm's procedure at each look bounds the error probability of all pairs together. Every pair gets
an equal part of it. Once a look finds a pair faster or slower, the pair's part passes to the others from that
look on (Maurer and Bretz, "Multiple testing in group sequential trials using graphical approaches",
Statistics in Biopharmaceutical Research 5, 2013).

At a look, two intervals must agree. The first is a 95 % BCa interval. The second has the level of the look,
and is a t interval for the logarithm of the ratio, with the bootstrap's standard error. Bootstrap quantiles
are not used for it, because quantiles so far out would depend on a handful of resamples. The second interval
is shown, because the first covers less than 95 % at the look that happens to decide.

**Drift.** The test assumes independent rounds. If a cell speeds up or slows down by itself over many rounds,
the rounds are not independent, and equal cells are found different far more often. The result therefore
reports a correlation of neighbouring rounds that is too large to be random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlflow.benchmarks.forecast import POWER, announced, observations_left
from rlflow.benchmarks.resampling import Floats, Interval, bca, draws, medians_left_out
from rlflow.benchmarks.student import NORMAL, t_quantile

Outcome = Literal["faster", "slower", "same within the margin", "undecided", "not comparable"]
DIFFERENT: tuple[Outcome, ...] = ("faster", "slower")
RESAMPLES = 1000
BY_CHANCE = 0.005  # probability with which independent rounds are wrongly reported as drifting
DRIFTS = (
    "the ratio drifts, neighbouring rounds have a correlation of {:.2f}: the interval is too narrow, and the "
    "drift may have caused the verdict"
)


@dataclass(frozen=True)
class Block:
    """The timed seconds of one turn of a cell."""

    round: int  # number of the round; blocks of the same round are compared
    seconds: float  # wall seconds for an iteration, or for a token; positive


@dataclass(frozen=True)
class Looks:
    """The rounds after which a pair may be decided. They are declared before the first round."""

    minimum: int = 6  # number of rounds before the first look, at least 3
    maximum: int = 48  # maximum number of rounds
    growth: float = 1.35  # rounds at a look divided by rounds at the look before it; above 1
    # probability that any verdict `faster` or `slower` is wrong, over all looks and all pairs
    alpha: float = 0.05

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of finished rounds at each look. The last one is the maximum."""
        looks, rounds = [], max(3, self.minimum)
        while rounds < self.maximum:
            looks.append(rounds)
            rounds = max(rounds + 1, round(rounds * self.growth))
        return (*looks, max(rounds, 3) if not looks else self.maximum)

    @property
    def level(self) -> float:
        """The confidence level of each look: 1 - alpha / number of looks."""
        return 1 - self.alpha / len(self.rounds)

    def shared(self, pairs: int) -> Looks:
        """Return the looks for one of ``pairs`` pairs, which gets an equal part of the error probability."""
        return replace(self, alpha=self.alpha / pairs)

    def due(self, rounds: int) -> bool:
        """Whether there is a declared look after this many rounds."""
        return rounds in self.rounds


@dataclass(frozen=True)
class Speed:
    """The comparison of a cell's speed with the base."""

    cell: str
    base: str
    outcome: Outcome
    # number of rounds used for the outcome: those at the deciding look, otherwise all rounds that both cells
    # have
    rounds: int
    # median seconds of the cell divided by those of the base; below 1: the cell is faster; NaN if not
    # comparable
    ratio: float
    # interval of the ratio at 95 %, valid for one look; None with fewer than two rounds or if not comparable
    interval: Interval | None
    # interval of the ratio at the level of a look, so that all looks together cover 95 %; this one is shown
    at_look: Interval | None
    margin: float  # a ratio from 1 / (1 + margin) to 1 + margin counts as equal
    # for an undecided pair, about how many more rounds it needs, at most `forecast.FARTHEST`; otherwise None
    more: int | None
    reason: str = ""  # why the cells are not comparable
    # True before the first look: `more` is then the number of rounds until it, since so few rounds do not
    # show the noise
    early: bool = False
    # correlation of neighbouring rounds if it is too large to be random, which means that the ratio drifts;
    # else None
    alike: float | None = None

    @property
    def decided(self) -> bool:
        """Whether the outcome is final, so that more rounds cannot change it."""
        return self.outcome != "undecided"

    @property
    def text(self) -> str:
        """The result as one sentence."""
        if self.outcome == "not comparable":
            return f"{self.cell} and {self.base} are not comparable: {self.reason}"
        outcome = (
            self.outcome
            if self.more is None
            else f"undecided, {announced(self.more, 'rounds', least=self.early)}"
        )
        ends = self.at_look
        rests = (
            f", {ends.low:.4g} … {ends.high:.4g} ({100 * (1 - Looks.alpha):.4g} % over all looks, "
            f"{ends.method})"
            if ends
            else ""
        )
        count = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        estimate = f"{self.ratio:.4g} times the seconds{rests}, {count}"
        drifts = f"; {DRIFTS.format(self.alike)}" if self.alike is not None else ""
        return f"{self.cell} vs {self.base}: {outcome}; {estimate}, margin {100 * self.margin:.4g} %{drifts}"


def compare_speeds(
    cells: Mapping[str, Sequence[Block]],
    base: str,
    *,
    margin: float = 0.05,
    looks: Looks | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Speed, ...]:
    """Compare each cell with ``base`` by the blocks recorded so far, in the order of ``cells``.

    The result depends only on the blocks: the function evaluates the declared looks and keeps the first
    decision. It may therefore be called after any round, and again after a restart. A round counts for a pair
    if both cells have exactly one block in it. Every cell except the base counts as a pair, even without
    blocks, so each call must have the same cells.
    """
    schedule, others = looks or Looks(), [name for name in cells if name != base]
    rounds = {name: _pair(name, base, cells[name], cells[base]) for name in others}
    speeds = {
        name: Speed(name, base, "not comparable", 0, math.nan, None, None, margin, None, reason)
        for name, (_, reason) in rounds.items()
        if reason
    }

    def look(name: str, count: int | None, may_decide: bool) -> Speed:
        different = sum(speed.outcome in DIFFERENT for speed in speeds.values())
        own = schedule.shared(len(others) - different)
        return _look(name, base, rounds[name][0][:count], margin, own, resamples, seed, may_decide=may_decide)

    for count in schedule.rounds:
        again = True
        while again:
            undecided = [name for name in others if name not in speeds and len(rounds[name][0]) >= count]
            new = {name: speed for name in undecided if (speed := look(name, count, True)).decided}
            speeds |= new
            again = any(speed.outcome in DIFFERENT for speed in new.values())
    return tuple(speeds.get(name) or look(name, None, False) for name in others)


def finished(speeds: Sequence[Speed], rounds: int, looks: Looks | None = None) -> bool:
    """Whether all pairs are decided, or the maximum number of rounds is reached."""
    return all(speed.decided for speed in speeds) or rounds >= (looks or Looks()).rounds[-1]


def _pair(cell: str, base: str, blocks: Sequence[Block], base_blocks: Sequence[Block]) -> tuple[Floats, str]:
    """Return (seconds [rounds, 2] of the common rounds, reason why there are none).

    The reason is empty if there are common rounds.
    """
    reason = _unusable(cell, blocks) or _unusable(base, base_blocks)
    seconds = np.empty((0, 2)) if reason else _rounds(blocks, base_blocks)
    return seconds, reason or ("" if len(seconds) else _apart(cell, base, blocks, base_blocks))


def _apart(cell: str, base: str, blocks: Sequence[Block], base_blocks: Sequence[Block]) -> str:
    """Return why two cells have no round in common, as text."""
    untimed = [name for name, side in ((cell, blocks), (base, base_blocks)) if not side]
    return (
        f"no turn of {' and of '.join(untimed)} is timed yet" if untimed else "they have no round in common"
    )


def _unusable(cell: str, blocks: Sequence[Block]) -> str:
    """Return why a cell's blocks cannot be compared; empty if they can be."""
    bad = sum(not (math.isfinite(block.seconds) and block.seconds > 0) for block in blocks)
    return f"{bad} of {len(blocks)} blocks of {cell} have no positive, finite seconds" if bad else ""


def _rounds(blocks: Sequence[Block], base_blocks: Sequence[Block]) -> Floats:
    """Return the seconds [rounds, 2] of cell and base, for the rounds in which each has exactly one block."""
    numbers = [[block.round for block in side] for side in (blocks, base_blocks)]
    both = [number for number in sorted(set(numbers[0])) if all(side.count(number) == 1 for side in numbers)]
    seconds = [{block.round: block.seconds for block in side} for side in (blocks, base_blocks)]
    return np.array([[side[number] for side in seconds] for number in both], dtype=np.float64).reshape(-1, 2)


def _look(
    cell: str,
    base: str,
    seconds: Floats,
    margin: float,
    looks: Looks,
    resamples: int,
    seed: int,
    *,
    may_decide: bool = True,
) -> Speed:
    """Return the comparison of a cell with the base after the rounds in ``seconds`` [rounds, 2].

    ``may_decide``: whether this is a declared look.
    """
    logs = np.ascontiguousarray(np.log(seconds).T)
    rounds, ratio = logs.shape[1], float(_log_ratio(logs))
    if rounds < 2:
        return Speed(
            cell, base, "undecided", 1, _exp(ratio), None, None, margin, _to_next_look(looks, 1), early=True
        )
    values = _log_ratio(logs[:, draws(logs.shape[1], resamples, seed)])
    shown = bca(values, ratio, medians_left_out(logs[0]) - medians_left_out(logs[1]), 0.95)
    error = 0.0 if shown.method == "no spread" else float(values.std())
    half = error * t_quantile((1 + looks.level) / 2, rounds - 1)
    at_look = Interval(ratio - half, ratio + half, looks.level, "t" if error else "no spread")
    outcome = (
        _outcome(min(shown.low, at_look.low), max(shown.high, at_look.high), math.log1p(margin))
        if may_decide
        else "undecided"
    )
    more = _more(ratio, error, rounds, margin, looks) if outcome == "undecided" else None
    early = outcome == "undecided" and rounds < looks.rounds[0]
    return Speed(
        cell,
        base,
        outcome,
        rounds,
        _exp(ratio),
        _ratios(shown),
        _ratios(at_look),
        margin,
        more,
        early=early,
        alike=alike(logs[0] - logs[1]),
    )


def alike(values: Floats) -> float | None:
    """Return the rank correlation of neighbouring values [rounds] if it is too large to be random, else None.

    "Too large" means that independent values reach it with a probability of at most `BY_CHANCE`. Returns None
    for fewer than 10 values. Bartels, "The rank version of von Neumann's ratio test for randomness", Journal
    of the American Statistical Association 77, 1982.
    """
    count = len(values)
    if count < 10:
        return None
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (count - 1) / 2
    # the expected value is 2 if neighbours are independent
    ratio = float(np.sum(np.diff(ranks) ** 2) / np.sum(ranks**2))
    spread = math.sqrt(
        4 * (count - 2) * (5 * count**2 - 2 * count - 9) / (5 * count * (count + 1) * (count - 1) ** 2)
    )
    return 1 - ratio / 2 if NORMAL.cdf((ratio - 2) / spread) < BY_CHANCE else None


def _log_ratio(logs: Floats) -> Floats:
    """Return the logarithm of the ratio of two medians, from logarithms of seconds [2, ..., rounds].

    For an even number of blocks, the median is the geometric mean of the middle two. Swapping the cells
    therefore gives the inverse ratio.
    """
    medians = np.median(logs, axis=-1)
    return np.asarray(medians[0] - medians[1])


def _outcome(low: float, high: float, margin: float) -> Outcome:
    """Return the outcome for an interval of the ratio's logarithm.

    An interval inside the margin means "same", even if it excludes a ratio of 1.
    """
    if -margin <= low and high <= margin:
        return "same within the margin"
    return "slower" if low > 0 else "faster" if high < 0 else "undecided"


def _more(ratio: float, error: float, rounds: int, margin: float, looks: Looks) -> int:
    """Return an estimate of how many more rounds decide a pair with probability `POWER`.

    Before the first look, this is the number of rounds until that look. The effect to find is the larger of
    the margin and the observed difference minus its standard error. Since few rounds may underestimate the
    noise, the quantile is Student's, and the noise is its upper bound at probability `POWER` (Wilson and
    Hilferty's chi-square). After two or three rounds, that bound would be hundreds of times the observed
    noise, and is not used.
    """
    to_next = _to_next_look(looks, rounds)
    if rounds < looks.rounds[0]:
        return to_next
    freedom, spread = rounds - 1, 2 / (9 * (rounds - 1))
    error /= (1 - spread - NORMAL.inv_cdf(POWER) * math.sqrt(spread)) ** 1.5
    effect = max(math.log1p(margin), abs(ratio) - error)
    return max(to_next, observations_left(rounds, error, effect, looks.level, freedom))


def _to_next_look(looks: Looks, rounds: int) -> int:
    """Return the number of rounds until the next look; 1 after the last look."""
    return next((look - rounds for look in looks.rounds if look > rounds), 1)


def _exp(logarithm: float) -> float:
    """Return exp of ``logarithm``, limited to 1e-304 … 1e304 to avoid overflow."""
    return math.exp(min(max(logarithm, -700.0), 700.0))


def _ratios(interval: Interval) -> Interval:
    """Convert an interval of the ratio's logarithm to an interval of the ratio."""
    return Interval(_exp(interval.low), _exp(interval.high), interval.level, interval.method)
