"""Findings on a run: a message for each rule that applies to it, most important first."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlflow.monitoring.diagnosis.evidence import MEASURES, Evidence
from rlflow.monitoring.diagnosis.rules import RULES, Rule

# a run with findings has at least this many iterations, since the first one has not changed any metric yet
LEAST = 3


@dataclass(frozen=True)
class Finding:
    """A reason why a run learns little."""

    name: str  # name of the rule
    # True if the training data are not what they seem, or if nothing is learned; False for advice on a
    # setting
    alarm: bool
    words: str
    remedy: str
    # the first iteration in which the condition is met; None if that is the run's first iteration, or if the
    # finding does not depend on a single metric
    since: int | None
    evidence: Mapping[str, float] = field(default_factory=dict)  # measure → value
    # measure → relation, threshold and source of this threshold
    thresholds: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        when = f" since iteration {self.since}" if self.since else ""
        return f"{self.words}{when}: {self.remedy}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return asdict(self)


def findings(run: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return the findings on a run, alarms before advice, each in the order of ``rules``.

    Empty if the run has fewer than LEAST iterations or uses the null backend, which never learns.
    """
    if len(run.iterations) < LEAST or run.settings.get("backend") == "null":
        return []
    values = {name: measure(run) for name, measure in MEASURES.items()}
    holding = [
        rule
        for rule in rules
        if all(condition.holds(values[condition.measure]) for condition in rule.conditions)
    ]
    return [_finding(rule, run, values) for rule in sorted(holding, key=lambda rule: not rule.alarm)]


def _finding(rule: Rule, run: Evidence, values: Mapping[str, float | None]) -> Finding:
    known = {name: value for name, value in values.items() if value is not None}
    words, remedy = (_filled(text, known) for text in (rule.words, rule.remedy))
    thresholds: dict[str, str] = {}
    for each in rule.conditions:
        before = f"{thresholds[each.measure]}; " if each.measure in thresholds else ""
        thresholds[each.measure] = f"{before}{each.relation} {each.threshold:g}: {each.source}"
    evidence = {name: known[name] for name in thresholds}
    return Finding(rule.name, rule.alarm, words, remedy, _since(rule, run), evidence, thresholds)


def _filled(text: str, values: Mapping[str, float]) -> str:
    """Fill the values of measures into a message. ``values``: the known measures, by name.

    If a value isn't known, the part in brackets that would show it is left out.
    """
    names = {name for _, name, _, _ in string.Formatter().parse(text) if name}
    if names <= set(values):
        return text.format_map(values)
    head, _, rest = text.partition(" (now {")
    return head + rest.partition(")")[2]


def _since(rule: Rule, run: Evidence) -> int | None:
    """Return the first iteration in which the rule's metric crosses its first threshold.

    None if that is the run's first iteration, or if it never happens. The metric may be normal again later
    on: a policy that one update has destroyed no longer changes.
    """
    series = run.series(rule.since) if rule.since else []
    number = next((iteration for iteration, value in series if rule.conditions[0].holds(value)), None)
    return number if series and number != series[0][0] else None
