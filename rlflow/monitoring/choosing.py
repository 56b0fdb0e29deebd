"""Filter and sort the output of `rlflow runs` by state, settings and latest metrics."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import PlanError, listed, nearest
from rlflow.monitoring.history import RunSummary, is_number
from rlflow.monitoring.recorded import EVALUATION, as_text, flags_of

SHORT = "eval/"  # short form of the prefix of evaluation metrics
CONDITION = re.compile(r"(?P<name>[^=!<>]+)(?P<sign><=|>=|!=|=|<|>)(?P<value>.*)", re.DOTALL)
SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class ListedRun:
    """A run in the output of `rlflow runs`, with all the values it can be filtered and sorted by."""

    summary: RunSummary
    settings: Mapping[str, Any]  # flag name → value
    # by name: settings, numbers of the last iteration and evaluation, and the run's own columns
    values: Mapping[str, Any]


def listed_run(summary: RunSummary) -> ListedRun:
    """Read a run's settings from its folder, and return the run with them."""
    settings = flags_of(summary.folder)
    columns = {
        "run": summary.folder.name,
        "flow": summary.flow,
        "state": summary.state,
        "iteration": summary.iteration,
        "updated": summary.updated,
    }
    return ListedRun(summary, settings, {**settings, **summary.metrics, **summary.evaluation, **columns})


@dataclass(frozen=True)
class Condition:
    """A condition given with ``--where``, such as ``hp.samples=8`` or ``eval/sampled>0.8``."""

    name: str
    sign: str
    value: str

    def holds(self, run: ListedRun) -> bool:
        """Whether a run meets the condition. Numbers are compared as numbers.

        A run that doesn't have the value only meets conditions with ``!=``.
        """
        if self.name not in run.values:
            return self.sign == "!="
        recorded, wanted = as_text(run.values[self.name]), as_text(self.value)
        numbers = as_number(run.values[self.name]), as_number(self.value)
        if None not in numbers:
            return SIGNS[self.sign](*numbers)
        return self.sign in ("=", "!=") and SIGNS[self.sign](recorded, wanted)


def as_number(value: Any) -> float | None:
    """Return a number, or a string that contains one, as a float. None for anything else."""
    if is_number(value):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def condition(text: str) -> Condition:
    """Parse a condition given with ``--where``. Raises PlanError if it is invalid."""
    match = CONDITION.fullmatch(text)
    if match is None:
        raise PlanError.of(
            "runs-where",
            f"'{text}' is not a condition",
            found=text,
            expected="NAME=VALUE, or !=, <, <=, >, >= instead of =",
            remedy="--where hp.samples=8, --where state=done, --where 'eval/sampled>0.8'",
        )
    if match["sign"] not in ("=", "!=") and as_number(match["value"].strip()) is None:
        raise PlanError.of(
            "runs-where",
            f"'{text}' does not compare with a number",
            found=match["value"],
            expected="a number",
            remedy="use = or != to compare text",
        )
    return Condition(full_name(match["name"].strip()), match["sign"], match["value"].strip())


def full_name(name: str) -> str:
    """Return a metric's name as runs record it, with ``eval/`` expanded to ``evaluation/``."""
    return EVALUATION + name.removeprefix(SHORT) if name.startswith(SHORT) else name


def chosen(runs: Sequence[ListedRun], where: Sequence[Condition], sort: str) -> list[ListedRun]:
    """Return the runs that meet all conditions in ``where``, sorted by the value ``sort``, lowest first.

    Runs without that value come first. Raises PlanError for a name that no run has.
    """
    names = sorted({name for run in runs for name in run.values})
    sort = full_name(sort)
    for name in (*(each.name for each in where), sort) if runs else ():
        if name not in names:
            raise PlanError.of(
                "runs-name",
                f"no run in this folder has '{name}'",
                found=name,
                expected=listed(names, 40),
                nearest=nearest(name, names),
                remedy="a setting by its flag, a metric of metrics.jsonl, or run, flow, state, "
                "iteration, updated",
            )
    return sorted(
        (run for run in runs if all(each.holds(run) for each in where)),
        key=lambda run: _order(run.values.get(sort)),
    )


def _order(value: Any) -> tuple[int, float, str]:
    """Return a sort key that puts missing values first, then strings, then numbers."""
    number = as_number(value)
    return (
        (2, number, "") if number is not None else (0, 0.0, "") if value is None else (1, 0.0, as_text(value))
    )
