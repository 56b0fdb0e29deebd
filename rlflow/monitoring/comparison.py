"""Compare recorded runs: which settings differ, their curves in one chart, and a verdict."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.author.figures import Figure, Of
from rlflow.errors import PlanError, listed, nearest, printable
from rlflow.monitoring.chart import chart, color, mark
from rlflow.monitoring.metric_names import is_mean
from rlflow.monitoring.recorded import EVALUATED, Curve, Recorded, as_text, differing

ENOUGH = 5  # each arm needs at least this many seeds for a ranking
# if these settings differ, evaluations may use other prompts or start from other weights
DATA = {"data", "held_out", "eval", "model"}
NO_ARM = {"seed"}  # settings that may differ between the runs of one arm
GRAPH = "graph"  # the digest of the graph; differences between graphs are printed as text instead


@dataclass(frozen=True)
class Arm:
    """Runs with the same settings, apart from their seeds."""

    label: str  # letter for the arm in charts
    runs: tuple[Recorded, ...]

    @property
    def seeds(self) -> int:
        """How many different seeds the arm has."""
        return len({as_text(run.settings.get("seed")) for run in self.runs})

    def curve(self, metric: str) -> Curve:
        """Return the mean of the runs' curves, with a point wherever all runs have one."""
        curves = [dict(run.curve(metric)) for run in self.runs]
        common = sorted(set.intersection(*map(set, curves)))
        return [(number, sum(curve[number] for curve in curves) / len(curves)) for number in common]


def arms_of(runs: Sequence[Recorded]) -> list[Arm]:
    """Group runs that have the same settings, apart from the seed, into arms. Keeps their order."""
    groups: dict[str, list[Recorded]] = {}
    for run in runs:
        key = {name: as_text(value) for name, value in sorted(run.settings.items()) if name not in NO_ARM}
        groups.setdefault(json.dumps(key), []).append(run)
    return [Arm(mark(position), tuple(group)) for position, group in enumerate(groups.values())]


def best(figure: Figure, values: Iterable[float]) -> float:
    """Return the highest value of an accuracy or a reward.

    For other metrics, higher isn't always better, so the result is NaN.
    """
    return max(values) if figure.of in (*EVALUATED, Of.REWARD) and figure.name != "missing" else math.nan


def area(curve: Curve) -> float:
    """Return the average height of a curve: the area under it (trapezoid rule) divided by its length.

    A single point gives its own value.
    """
    pairs = list(itertools.pairwise(curve))
    length = curve[-1][0] - curve[0][0]
    return (
        sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairs) / length if length else curve[0][1]
    )


def figures_of(run: Recorded, metric: str) -> dict[str, float | None]:
    """Return a run's results and costs by name: the metric's last and best value, its area, and the costs.

    A value is None if the run's folder doesn't have it.
    """
    curve = run.curve(metric)
    height = best(run.table[metric], [value for _, value in curve]) if curve else math.nan
    return {
        "last": curve[-1][1] if curve else None,
        "best": None if math.isnan(height) else height,
        "area": area(curve) if curve else None,
        "seconds": run.costs.seconds,
        "tokens": run.costs.tokens,
        "rows trained": run.costs.trained,
    }


@dataclass(frozen=True)
class Comparison:
    """Runs to compare, grouped into arms."""

    arms: tuple[Arm, ...]
    metrics: tuple[str, ...]  # the metrics to draw; the table and the verdict use only the first
    # run name → lines on how the run's graph differs from the first run's graph
    graphs: Mapping[str, Sequence[str]]

    @property
    def runs(self) -> list[Recorded]:
        """All runs, arm by arm."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def settings(self) -> dict[str, list[str]]:
        """The settings that differ between arms, with the value in each arm."""
        settings = differing([arm.runs[0].settings for arm in self.arms])
        return {name: values for name, values in settings.items() if name not in {GRAPH, *NO_ARM}}

    def as_json(self) -> dict[str, Any]:
        """Return everything that is printed, as plain values."""
        runs = [
            {
                "run": str(run.folder),
                "arm": arm.label,
                "state": run.summary.state,
                "iterations": run.summary.iteration,
                "seed": run.settings.get("seed"),
                "metrics": {
                    metric: {"curve": run.curve(metric), **figures_of(run, metric)} for metric in self.metrics
                },
            }
            for arm in self.arms
            for run in arm.runs
        ]
        settings = {
            name: dict(zip([arm.label for arm in self.arms], values, strict=True))
            for name, values in self.settings.items()
        }
        return {
            "settings": settings,
            "graphs": {name: list(lines) for name, lines in self.graphs.items()},
            "runs": runs,
            "verdict": verdict(self),
            "cautions": cautions(self),
        }


def compared(
    runs: Sequence[Recorded], metrics: Sequence[str], graphs: Mapping[str, Sequence[str]]
) -> Comparison:
    """Compare runs by held-out accuracy or, if none of them has it, by mean reward.

    If there are several rewards, the mean of each is drawn. The table shows the first one named in
    ``metrics`` or, if there is none, the first one. ``metrics``: more metrics to draw. ``graphs``: see
    ``Comparison``. Raises PlanError for a metric that no run has.
    """
    names = sorted({name for run in runs for name in run.metrics})
    unknown = next((metric for metric in metrics if metric not in names), None)
    if unknown is not None:
        raise PlanError.of(
            "no-metric",
            f"none of the runs has the metric '{unknown}'",
            found=unknown,
            expected=listed(names),
            nearest=nearest(unknown, names),
            remedy="--metric NAME, with a name from metrics.jsonl",
        )
    means = dict.fromkeys(name for run in runs for name in run.keys(is_mean))
    requested_first = sorted(means, key=lambda name: metrics.index(name) if name in metrics else len(metrics))
    chosen = dict.fromkeys(
        [*([name for run in runs for name in run.shares][:1] or requested_first), *metrics]
    )
    return Comparison(tuple(arms_of(runs)), tuple(chosen), graphs)


def verdict(comparison: Comparison) -> str:
    """Return a sentence with the conclusion that the runs allow.

    If any arm has fewer than ENOUGH seeds, nothing is ranked. Otherwise the sentence says whether the ranges
    of the last values overlap, which is not a statistical test.
    """
    arms, metric = comparison.arms, next(iter(comparison.metrics), "")
    if len(arms) == 1:
        return f"all {len(arms[0].runs)} runs have the same settings: there is nothing to rank"
    if all(len(arm.runs) == 1 for arm in arms):
        return "not enough to rank: one run each"
    if min(arm.seeds for arm in arms) < ENOUGH:
        counts = ", ".join(f"{arm.label} has {arm.seeds} seed{'s' * (arm.seeds != 1)}" for arm in arms)
        return f"not enough to rank: {counts}; each needs at least {ENOUGH}"
    ends = [
        [value for run in arm.runs if (value := figures_of(run, metric)["last"]) is not None] for arm in arms
    ]
    if not all(ends):
        return f"not enough to rank: not every arm has {metric or 'a metric to compare'}"
    ranges = sorted((min(values), max(values)) for values in ends)
    apart = all(high < low for (_, high), (low, _) in itertools.pairwise(ranges))
    return (
        f"the ranges of the last {metric} {'do not overlap' if apart else 'overlap'}; that is not a "
        "statistical test"
    )


def cautions(comparison: Comparison) -> list[str]:
    """Return what makes the runs hard to compare: different data, unfinished runs or other lengths."""
    runs, settings = comparison.runs, comparison.settings
    data = [name for name in settings if name in DATA or name.startswith("data.")]
    unfinished = [run.name for run in runs if run.summary.state != "done"]
    lengths = {arm.label: sorted({run.summary.iteration for run in arm.runs}) for arm in comparison.arms}
    sentences = []
    if data:
        sentences.append(
            f"{listed(data)} differ: the evaluations may use other prompts, or start from other weights"
        )
    if unfinished:
        sentences.append(f"not finished: {listed(unfinished)}")
    if len({tuple(counts) for counts in lengths.values()}) > 1 or any(
        len(counts) > 1 for counts in lengths.values()
    ):
        iterations = ", ".join(f"{label} {'/'.join(map(str, counts))}" for label, counts in lengths.items())
        sentences.append(f"the last values are after different numbers of iterations: {iterations}")
    return sentences


def drawn(comparison: Comparison, width: int) -> list[RenderableType]:
    """Return the comparison as it is printed to a terminal with ``width`` columns."""
    parts: list[RenderableType] = [_settings(comparison)]
    for name, lines in comparison.graphs.items():
        parts.append(
            Text(
                printable(
                    "\n".join(
                        [
                            f"graph of {name}, compared with {comparison.runs[0].name}:",
                            *(f"  {line}" for line in lines),
                        ]
                    )
                )
            )
        )
    for metric in comparison.metrics:
        curves = {arm.label: arm.curve(metric) for arm in comparison.arms}
        parts += [
            Text(""),
            Text(printable(f"{metric} after iterations{_of_means(comparison)}"), style="bold"),
            chart(curves, width),
        ]
        absent = [label for label, curve in curves.items() if not curve]
        parts += [Text(f"  without this metric: {listed(absent)}")] if absent else []
    about = [Text(printable(f"last, best and area of {metric}")) for metric in comparison.metrics[:1]]
    parts += [
        Text(""),
        *about,
        _table(comparison),
        *(Text(printable(sentence)) for sentence in cautions(comparison)),
    ]
    return [*parts, Text(printable(verdict(comparison)), style="bold")]


def _of_means(comparison: Comparison) -> str:
    return ", means over seeds" if any(len(arm.runs) > 1 for arm in comparison.arms) else ""


def _settings(comparison: Comparison) -> RenderableType:
    """Return a table with a row per differing setting and a column per arm."""
    table = Table("setting", box=None, padding=(0, 2, 0, 0))
    for position, arm in enumerate(comparison.arms):
        table.add_column(Text(arm.label, style=color(position)), overflow="fold")
    table.add_row(
        "run", *(Text(printable(", ".join(run.name for run in arm.runs))) for arm in comparison.arms)
    )
    for name, values in comparison.settings.items():
        table.add_row(Text(printable(name)), *(Text(printable(value)) for value in values))
    if not comparison.settings:
        table.add_row("no setting differs", *[""] * len(comparison.arms))
    return table


def _table(comparison: Comparison) -> Table:
    """Return a table of the first metric and the costs, with a row per run.

    Arms with several runs get two more rows, for the mean and the range.
    """
    metric = next(iter(comparison.metrics), "")
    table = Table("", "run", "state", box=None, padding=(0, 2, 0, 0))
    for name in ("last", "best", "area", "seconds", "tokens", "rows trained"):
        table.add_column(name, justify="right")
    for position, arm in enumerate(comparison.arms):
        rows = [figures_of(run, metric) for run in arm.runs]
        for run, figures in zip(arm.runs, rows, strict=True):
            cells = [_number(name, figure) for name, figure in figures.items()]
            table.add_row(
                Text(arm.label, style=color(position)), Text(printable(run.name)), run.summary.state, *cells
            )
        if len(rows) > 1:
            for title, measure in (("mean", _mean), ("range", _range)):
                table.add_row(
                    arm.label, title, "", *(measure(name, [row[name] for row in rows]) for name in rows[0])
                )
    return table


def _number(name: str, value: float | None) -> str:
    """Format a result or cost. None gives an empty string."""
    if value is None:
        return ""
    return (
        f"{value:,.0f}"
        if name in ("tokens", "rows trained")
        else f"{value:.1f}"
        if name == "seconds"
        else f"{value:.4g}"
    )


def _mean(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _number(name, sum(known) / len(known)) if known else ""


def _range(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{_number(name, min(known))} … {_number(name, max(known))}" if known else ""
