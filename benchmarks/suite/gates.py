"""Check whether a run's metrics stay within the corridor of their trusted history.

The corridor of a metric is the two-sided prediction interval for one more run: mean ± t(n-1) s √(1 + 1/n)
(Geisser, "Predictive Inference", 1993). The levels of a suite's metrics follow Holm's procedure (Scandinavian
Journal of Statistics 6, 1979): if nothing changed, a suite fails with a probability of at most alpha.

A metric fails on both sides of its corridor, as in the metric-history gate of miles, because an unexpected
improvement is often a broken measurement. To accept an improvement, mark the new runs as trusted. The history
must come from one kind of machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlflow.benchmarks.holm import holm
from rlflow.benchmarks.student import t_quantile, t_tail

Better = Literal["higher", "lower"]
State = Literal["inside", "regression", "improvement", "missing", "no history"]
LEAST_RUNS = 5  # number of trusted runs that a corridor needs


@dataclass(frozen=True)
class Gate:
    """One metric of a run, compared with its history."""

    metric: str
    state: State
    value: float | None  # the run's value; None if it is missing
    mean: float  # mean over the trusted runs; NaN if there are fewer than LEAST_RUNS
    # lowest and highest value inside the corridor, at the level that Holm's procedure gives this metric
    corridor: tuple[float, float] | None
    runs: int  # number of trusted runs with a finite value

    @property
    def failed(self) -> bool:
        """Whether this gate makes the suite fail."""
        return self.state in ("regression", "improvement", "missing")

    @property
    def text(self) -> str:
        """The result as one sentence."""
        if self.state == "missing":
            return f"{self.metric}: error, the run has no finite value ({'missing' if self.value is None else self.value})"
        if self.corridor is None:
            return (
                f"{self.metric}: {self.value:.6g}, passes without history ({self.runs} trusted runs "
                f"of at least {LEAST_RUNS})"
            )
        low, high = self.corridor
        where = (
            "inside"
            if self.state == "inside"
            else f"{'an' if self.state == 'improvement' else 'a'} {self.state}, outside"
        )
        return (
            f"{self.metric}: {self.value:.6g} is {where} of {low:.6g} … {high:.6g}, the corridor of "
            f"{self.runs} trusted runs"
        )


@dataclass(frozen=True)
class Gated:
    """All gates of a suite."""

    gates: tuple[Gate, ...]  # in the order of the suite's declarations

    @property
    def exit_code(self) -> int:
        """The exit code for the suite: 1 if a gate failed, otherwise 0."""
        return int(any(gate.failed for gate in self.gates))

    @property
    def text(self) -> str:
        """The results as text, with one line per gate."""
        return "\n".join(gate.text for gate in self.gates)


def gated(
    declared: Mapping[str, Better],
    history: Mapping[str, Sequence[float]],
    run: Mapping[str, float | None],
    *,
    alpha: float = 0.05,
) -> Gated:
    """Compare the metrics of a run with those of trusted runs.

    ``declared``: the gates' metrics, each with the direction that is better. ``history``: the trusted runs'
    values of each metric; values that are not finite are ignored. ``run``: the run's value of each metric.
    ``alpha``: probability that the suite fails although nothing changed.
    """
    trusted = {
        name: np.array([value for value in history.get(name, ()) if math.isfinite(value)], dtype=np.float64)
        for name in declared
    }
    surprise = {
        name: _p(trusted[name], float(value))
        for name, value in run.items()
        if name in declared and _finite(value) and value is not None and len(trusted[name]) >= LEAST_RUNS
    }
    levels = holm(surprise, alpha)
    return Gated(
        tuple(
            _gate(name, better, trusted[name], run.get(name), surprise.get(name), levels)
            for name, better in declared.items()
        )
    )


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _gate(
    name: str,
    better: Better,
    trusted: np.ndarray,
    value: float | None,
    p: float | None,
    levels: Mapping[str, tuple[float, bool]],
) -> Gate:
    mean = float(trusted.mean()) if len(trusted) >= LEAST_RUNS else math.nan
    if value is None or not math.isfinite(value):
        return Gate(name, "missing", value, mean, None, len(trusted))
    if p is None:
        return Gate(name, "no history", value, mean, None, len(trusted))
    level, outside = levels[name]
    half = _error(trusted) * t_quantile(1 - level / 2, len(trusted) - 1)
    state: State = (
        "inside" if not outside else "improvement" if (value > mean) == (better == "higher") else "regression"
    )
    return Gate(name, state, value, mean, (mean - half, mean + half), len(trusted))


def _error(trusted: np.ndarray) -> float:
    """Return the standard deviation of the difference between one more run and the mean of the trusted runs.

    It is at least the rounding error of the values.
    """
    rounding = 1e-9 * float(np.abs(trusted).max())
    return max(float(trusted.std(ddof=1)), rounding) * math.sqrt(1 + 1 / len(trusted))


def _p(trusted: np.ndarray, value: float) -> float:
    """Return the two-sided p-value for the value of one more run.

    If all trusted runs are 0, any other value has p = 0.
    """
    distance, error = abs(value - float(trusted.mean())), _error(trusted)
    if error == 0:
        return 1.0 if distance == 0 else 0.0
    return 2 * t_tail(distance / error, len(trusted) - 1)
