"""Partial metrics: each rank or chunk computes its part of a metric, and the parts are merged.

Sums are exact, so a metric doesn't depend on how rows are split over ranks or chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from torch import Tensor

from rlflow.author.figures import Figure, Of

Kind = Literal["mean", "max", "sum"]


@dataclass(frozen=True)
class PartialMetric:
    """The sum, count and maximum of some values.

    ``kind`` says which metric they make: a mean, maximum or sum.
    """

    total: Fraction | float
    count: int
    highest: float
    kind: Kind = "mean"

    @staticmethod
    def of(values: Tensor, kind: Kind = "mean") -> PartialMetric:
        """Return the partial metric of all values that are not NaN."""
        present = values.double()[~values.isnan()]
        if not present.numel():
            return PartialMetric(Fraction(0), 0, -math.inf, kind)
        return PartialMetric(exact_sum(present), present.numel(), float(present.max()), kind)

    @staticmethod
    def sum(value: float) -> PartialMetric:
        """Return a partial metric, such as a count, that is added up over ranks."""
        return PartialMetric(float(value), 1, float(value), "sum")

    @property
    def value(self) -> float:
        """The merged metric, or NaN for a mean or maximum of no values."""
        if self.kind == "sum":
            return float(self.total)
        if not self.count:
            return math.nan
        return self.highest if self.kind == "max" else float(self.total / self.count)

    def __add__(self, other: PartialMetric) -> PartialMetric:
        return PartialMetric(
            self.total + other.total, self.count + other.count, max(self.highest, other.highest), self.kind
        )


# metric of a node by its name; a Figure if the name alone does not give its scope
Label = str | Figure
PartialMetrics = Mapping[Label, PartialMetric]
DIGITS = 53  # binary digits of a float64
# number of binary digits in the lower half. Sums of up to 2^26 values of either half are exact in float64
LOW = 26


def exact_sum(values: Tensor) -> Fraction | float:
    """Return the sum of float64 values without rounding, so that the sums of parts add up exactly.

    If a value is infinite or NaN, so is the result.
    """
    fractions, exponents = np.frexp(values.numpy())
    if not np.isfinite(fractions).all():
        return float(values.sum())
    digits = np.ldexp(fractions, DIGITS).astype(np.int64)
    lowest = int(exponents.min(initial=0))
    places = exponents - lowest
    high, low = (np.bincount(places, weights=half) for half in (digits >> LOW, digits & (1 << LOW) - 1))
    sides = enumerate(zip(high.tolist(), low.tolist(), strict=True))
    total = sum(((int(more) << LOW) + int(less)) << place for place, (more, less) in sides)
    return Fraction(total, 1 << DIGITS - lowest) if lowest <= DIGITS else Fraction(total << lowest - DIGITS)


def merged(parts: Sequence[PartialMetrics]) -> dict[Label, PartialMetric]:
    """Merge the partial metrics of all ranks or chunks, by name."""
    metrics: dict[Label, PartialMetric] = {}
    for part in parts:
        for name, tally in part.items():
            metrics[name] = metrics[name] + tally if name in metrics else tally
    return metrics


def accumulated(
    tallies: dict[Figure, PartialMetric], more: Mapping[Figure, PartialMetric]
) -> dict[Figure, float]:
    """Merge a node's metrics into ``tallies``, and return the merged value of each.

    A node logs more than once per iteration if a `repeat` calls it in several tries.
    """
    for figure, tally in more.items():
        tallies[figure] = tallies[figure] + tally if figure in tallies else tally
    return {figure: tallies[figure].value for figure in more}


def figures(metrics: PartialMetrics, of: Of, node: str, role: str = "") -> dict[Figure, PartialMetric]:
    """Key the partial metrics of a node by Figure.

    ``of``: what the metrics measure, for keys that are plain names.
    """
    return {
        label._replace(node=node, role=role)
        if isinstance(label, Figure)
        else Figure(of, label, node, role): tally
        for label, tally in metrics.items()
    }


def known(metrics: Mapping[str, float]) -> dict[Label, PartialMetric]:
    """Convert numbers that are the same on every rank to partial metrics."""
    return {name: PartialMetric(value, 1, value) for name, value in metrics.items()}


def as_kind(name: str) -> Kind:
    """Return how to merge a stage's metric: "max" if its name ends in ``_max``, else "mean"."""
    return "max" if name.endswith("_max") else "mean"
