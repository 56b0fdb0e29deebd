"""Measures of a run, computed from its recorded metrics and settings.

A measure is a function that returns a number, or None if the records don't have the values it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

from rlflow.author.figures import Figure, Of

Series = Sequence[tuple[int, float]]  # (iteration, value)
Measured = tuple[Of, str]  # the subject of a figure, and its name
TOKENS = "funnel/tokens"


@dataclass(frozen=True)
class Evidence:
    """A run's recorded iterations, and its settings by flag, such as hp.clip."""

    iterations: Sequence[tuple[int, Mapping[Figure, float]]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def series(self, measured: Measured) -> Series:
        """Return the values of a metric as (iteration, value) pairs.

        If several roles or updates have this metric, the first one's values are returned.
        """
        return self.of(next((figure for figure in self._figures(measured) if not figure.part), None))

    def of(self, figure: Figure | None) -> Series:
        """Return the values of a figure as (iteration, value) pairs. Empty if it is None."""
        return (
            [(number, values[figure]) for number, values in self.iterations if figure in values]
            if figure is not None
            else []
        )

    def setting(self, name: str) -> float | None:
        """Return a setting as a number, or None if it is missing or isn't a number."""
        value = self.settings.get(name)
        try:
            return float(value) if value is not None and not isinstance(value, bool) else None
        except (TypeError, ValueError):
            return None

    def policy(self, name: str) -> Series:
        """Return a metric of the policy's update as (iteration, value) pairs.

        The policy's update is the first one that changes log-probs.
        """
        update = next(iter(self._figures((Of.UPDATE, "funnel/moved"))), None)
        return self.of(update and update._replace(name=name))

    @property
    def rewards(self) -> list[str]:
        """The reward roles whose scores are recorded separately.

        If there is only one, or if they are all recorded together, this is a single empty name.
        """
        return list(
            dict.fromkeys(figure.part for figure in self._figures((Of.SCORES, "lowest")) if figure.part)
        ) or [""]

    def scores(self, name: str, reward: str) -> Series:
        """Return a metric of a reward role's scores as (iteration, value) pairs.

        ``reward``: a name from ``rewards``.
        """
        return self.of(
            next((figure for figure in self._figures((Of.SCORES, name)) if figure.part == reward), None)
        )

    def means(self, reward: str) -> Series:
        """Return a reward role's mean score as (iteration, value) pairs.

        ``reward``: a name from ``rewards``.
        """
        means = (figure for figure in self._figures((Of.REWARD, "mean")) if not figure.part)
        return self.of(next((figure for figure in means if reward in ("", figure.role)), None))

    def _figures(self, measured: Measured) -> list[Figure]:
        return self._measured.get(measured, [])

    @cached_property
    def _measured(self) -> dict[Measured, list[Figure]]:
        measured: dict[Measured, list[Figure]] = {}
        for figure in dict.fromkeys(figure for _, values in self.iterations for figure in values):
            measured.setdefault((figure.of, figure.name), []).append(figure)
        return measured


Measure = Callable[[Evidence], float | None]


def mean(series: Series) -> float | None:
    """Return the mean of the values in a series, or None if it is empty."""
    return fmean(value for _, value in series) if series else None


def late(series: Series) -> Series:
    """Return the second half of a series."""
    return series[len(series) // 2 :]


def early(series: Series) -> Series:
    """Return the first tenth of a series, but at least three values."""
    return series[: max(3, len(series) // 10)]


def third(series: Series) -> int:
    """Return how many values are a third of a series, but at least 3."""
    return max(3, len(series) // 3)


def last_third(series: Series) -> Series:
    """Return the last third of a series, but at least three values."""
    return series[-third(series) :]


def in_the_end(of: Of, name: str) -> Measure:
    """Return a measure that averages a metric over the second half of a run."""
    return lambda run: mean(late(run.series((of, name))))


def at_first(of: Of, name: str) -> Measure:
    """Return a measure that averages a metric over the first tenth of a run."""
    return lambda run: mean(early(run.series((of, name))))


def initially(of: Of, name: str) -> Measure:
    """Return a measure that takes a metric's value from the first iteration that has it."""
    return lambda run: series[0][1] if (series := run.series((of, name))) else None


def setting(name: str) -> Measure:
    """Return a measure that gives the value of a setting."""
    return lambda run: run.setting(name)


def lowest(run: Evidence, reward: str) -> float | None:
    """Return a reward's typical lowest score, which is the median of the iterations' lowest scores.

    Only the first tenth of the run is used, because a KL penalty in the reward can push later scores far
    below what the reward itself gives.
    """
    lows = early(run.scores("lowest", reward))
    return median(value for _, value in lows) if lows else None


def span(run: Evidence, reward: str) -> float | None:
    """Return the range of a reward's scores: the highest in the run minus ``lowest``, but at least 0."""
    low, highs = lowest(run, reward), run.scores("highest", reward)
    return max(0.0, max(value for _, value in highs) - low) if low is not None and highs else None


def _of_rewards(measure: Callable[[str], float | None], run: Evidence) -> float | None:
    """Return the mean of ``measure`` over the reward roles, or None if it has no value for any of them."""
    known = [value for reward in run.rewards if (value := measure(reward)) is not None]
    return fmean(known) if known else None


def place(run: Evidence) -> float | None:
    """Return where the mean score of the run's first tenth lies in the score range.

    0 is the lowest score and 1 the highest. Several rewards are averaged.
    """
    return _of_rewards(lambda reward: _placed(run, reward, mean(early(run.means(reward)))), run)


def place_now(run: Evidence) -> float | None:
    """Return ``place`` for the last third of the run."""
    return _of_rewards(lambda reward: _placed(run, reward, mean(last_third(run.means(reward)))), run)


def _placed(run: Evidence, reward: str, score: float | None) -> float | None:
    """Return where a score lies in the reward's score range, from 0 (lowest) to 1 (highest).

    If all scores in the run are equal, this is the score itself, limited to 0 to 1.
    """
    width, low = span(run, reward), lowest(run, reward)
    if score is None or width is None or low is None:
        return None
    return (score - low) / width if width else min(max(score, 0.0), 1.0)


def mixed_place(run: Evidence) -> float | None:
    """Return ``place`` for groups with differing scores only."""
    return _of_rewards(
        lambda reward: _placed(run, reward, mean(early(run.scores("uneven_mean", reward)))), run
    )


def improvement(run: Evidence) -> float | None:
    """Return how much the mean score rose from the first to the last third, relative to the score range.

    0 if all scores are equal. With several rewards, this is the largest rise.
    """
    return max(
        (value for reward in run.rewards if (value := _improvement(run, reward)) is not None), default=None
    )


def _improvement(run: Evidence, reward: str) -> float | None:
    series, width = run.means(reward), span(run, reward)
    first, last = mean(series[: third(series)]), mean(last_third(series))
    if first is None or last is None or width is None:
        return None
    return (last - first) / width if width else 0.0


def clipped(run: Evidence) -> float | None:
    """Return the share of tokens that lost their gradient to clipping, over the run.

    It is relative to the tokens that would have a gradient without clipping.
    """
    above, below, moving = (
        mean(run.policy(f"{TOKENS}_{name}")) for name in ("clipped_above", "clipped_below", "with_gradient")
    )
    if above is None or below is None or moving is None:
        return None
    return (above + below) / (above + below + moving) if above + below + moving else 0.0


def moved(run: Evidence) -> float | None:
    """Return how much an update changes a token's log-prob on average, in nats.

    If an update takes several optimizer steps, this is averaged over them. If it takes one, the change is
    measured afterwards; a change of exactly 0 then gives None, because runs that didn't measure it record 0.
    """
    steps, nats = mean(run.policy("steps")), mean(run.policy("funnel/moved"))
    return nats if steps is not None and (steps > 1 or nats) else None


def moved_most(run: Evidence) -> float | None:
    """Return the largest log-prob change in any iteration, in nats. See ``moved``.

    It is the maximum because the log-probs of a collapsed policy no longer change.
    """
    return max(value for _, value in run.policy("funnel/moved")) if moved(run) is not None else None


def moving(run: Evidence) -> float | None:
    """Return the share of tokens with a gradient, over the second half of the run.

    The tokens are those of the policy's update or, without one, of the first update that counts them.
    """
    tokens, those = (
        mean(late(run.policy(name) or run.series((Of.UPDATE, name))))
        for name in (TOKENS, f"{TOKENS}_with_gradient")
    )
    return those / tokens if tokens and those is not None else None


def odds(run: Evidence) -> float | None:
    """Return exp(score range / beta), which bounds how strongly the policy can prefer good answers.

    Under a KL penalty, this is the most by which the best policy raises the odds of good over bad answers,
    compared with the reference.
    """
    beta, widths = (
        run.setting("hp.beta"),
        [width for reward in run.rewards if (width := span(run, reward)) is not None],
    )
    return math.exp(min(sum(widths) / beta, 50.0)) if beta and widths else None


def rate(run: Evidence) -> float | None:
    """Return the mean learning rate of the policy's update."""
    return mean(run.policy("lr"))


def skipped(run: Evidence) -> float | None:
    """Return the share of optimizer steps that were skipped because their gradient was not finite."""
    steps, left = mean(run.series((Of.UPDATE, "steps"))), mean(run.series((Of.UPDATE, "skipped_steps")))
    return left / (steps + left) if steps is not None and left is not None and steps + left else None


def uneven(run: Evidence) -> float | None:
    """Return the share of groups with unequal scores, over the second half of the run.

    1 if no groups are recorded.
    """
    flat = in_the_end(Of.SCORES, "even_groups")(run)
    return 1 - (flat or 0.0) if run.iterations else None


def used(run: Evidence) -> float | None:
    """Return the share of sampled rows that were trained on, over the second half of the run."""
    sampled, trained = (
        mean(late(run.series((Of.ROWS, f"funnel/rows_{name}")))) for name in ("sampled", "used")
    )
    return trained / sampled if sampled and trained is not None else None


def drift(run: Evidence) -> float | None:
    """Return how much the mismatch between trainer and sampler has grown.

    This is its mean over the second half of the run, divided by its value in the first iteration.
    """
    first, last = (
        initially(Of.ROWS, "policy/mismatch_mean")(run),
        in_the_end(Of.ROWS, "policy/mismatch_mean")(run),
    )
    return last / max(first, 1e-7) if first is not None and last is not None else None


MEASURES: Mapping[str, Measure] = {
    "staleness": setting("staleness"),
    "beta": setting("hp.beta"),
    "lr": rate,
    "mismatch": in_the_end(Of.ROWS, "policy/mismatch_mean"),
    "mismatch_first": initially(Of.ROWS, "policy/mismatch_mean"),
    "drift": drift,
    "factor_first": initially(Of.ROWS, "policy/mismatch_factor"),
    "kl_sampler": in_the_end(Of.ROWS, "policy/kl_sampler"),
    "missing": in_the_end(Of.SCORES, "missing_rate"),
    "moving": moving,
    "used": used,
    "skipped": skipped,
    "moved": moved,
    "moved_most": moved_most,
    "clipped": clipped,
    "entropy_early": at_first(Of.ROWS, "policy/entropy"),
    "entropy": in_the_end(Of.ROWS, "policy/entropy"),
    "uneven": uneven,
    "flat": in_the_end(Of.SCORES, "even_groups"),
    "flat_early": at_first(Of.SCORES, "even_groups"),
    "flat_lowest": at_first(Of.SCORES, "even_lowest"),
    "flat_highest": at_first(Of.SCORES, "even_highest"),
    "mixed_place": mixed_place,
    "place": place,
    "place_now": place_now,
    "improvement": improvement,
    "truncated": in_the_end(Of.ROWS, "response/truncated"),
    "kl": in_the_end(Of.ROWS, "policy/kl_reference"),
    "explained": in_the_end(Of.ROWS, "critic/explained_variance"),
    "odds": odds,
}
