"""The findings on a run: which rules hold of it, in words, most important first."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlflow.monitoring.diagnosis.evidence import MEASURES, Evidence
from rlflow.monitoring.diagnosis.rules import RULES, Rule

LEAST = 3  # iterations without which nothing is said: a first iteration has moved nothing yet


@dataclass(frozen=True)
class Finding:
    """A reason for which a run learns little."""

    name: str  # of the rule
    # whether what is learned from is not what it seems, or nothing is learned; else advice on a setting
    alarm: bool
    words: str
    remedy: str
    # the first iteration in which it holds; None where that is the first of the run, or it is not of one
    # metric
    since: int | None
    evidence: Mapping[str, float] = field(default_factory=dict)  # measure → value
    # measure → relation, threshold and where that is from
    thresholds: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        when = f" since iteration {self.since}" if self.since else ""
        return f"{self.words}{when}: {self.remedy}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def findings(run: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """The findings on a run, alarms first, each kind in the order of the table; none on a run of less than
    LEAST iterations, nor on one of the null backend, which learns nothing on purpose."""
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
    """The text with the measures that it names; where one is not known, without the brackets that would have
    said it."""
    names = {name for _, name, _, _ in string.Formatter().parse(text) if name}
    if names <= set(values):
        return text.format_map(values)
    head, _, rest = text.partition(" (now {")
    return head + rest.partition(")")[2]


def _since(rule: Rule, run: Evidence) -> int | None:
    """The first iteration in which the rule's metric is beyond its first threshold, if that is not the first
    of the run. It may be within the threshold again later: a policy that one update has destroyed moves no
    more."""
    series = run.series(rule.since) if rule.since else []
    number = next((iteration for iteration, value in series if rule.conditions[0].holds(value)), None)
    return number if series and number != series[0][0] else None
