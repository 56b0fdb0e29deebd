"""Findings in recorded runs: the planted cause comes first, and healthy twins have no findings."""

import json
from pathlib import Path

import pytest
from keyed import figures

from rlflow.author.figures import Of
from rlflow.monitoring.diagnosis.evidence import MEASURES, Evidence
from rlflow.monitoring.diagnosis.findings import LEAST, findings
from rlflow.monitoring.diagnosis.rules import RULES, Rule, RuleCondition

# by `python benchmarks/stalls.py fixtures`
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
PLANTED = [path for path in RECORDED if not path.name.startswith("healthy")]
HEALTHY = [path for path in RECORDED if path.name.startswith("healthy")]


def read(path):
    content = json.loads(path.read_text())
    return Evidence(
        [(number, figures(values)) for number, values in content["iterations"]], content["settings"]
    )


@pytest.mark.parametrize("path", PLANTED, ids=lambda path: path.stem)
def test_the_planted_cause_is_named_first(path):
    named = [finding.name for finding in findings(read(path))]
    assert path.name.startswith(f"{named[0]}-"), named


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_no_findings(path):
    assert findings(read(path)) == []


def test_most_rules_have_recordings():
    assert (
        len({rule.name for rule in RULES for path in PLANTED if path.name.startswith(f"{rule.name}-")}) >= 10
    )
    assert len(HEALTHY) >= 3


def test_every_rule_has_measures_and_a_source_of_its_thresholds():
    for rule in RULES:
        assert rule.conditions
        assert all(condition.measure in MEASURES and condition.source for condition in rule.conditions)
    assert len({rule.name for rule in RULES}) == len(RULES)


MISSING = Rule(
    "missing",
    True,
    (RuleCondition("missing", "above", 0.3, "by hand"),),
    "{missing:.0%} are missing",
    "mend it (now {lr:g})",
    (Of.SCORES, "missing_rate"),
)
COLD = Rule(
    "critic-cold",
    False,
    (RuleCondition("explained", "below", 0.0, "by hand"),),
    "it explains {explained:.1f}",
    "warm it up",
    (Of.ROWS, "critic/explained_variance"),
)
RATES = (0.1, 0.5, 0.1, 0.6, 0.7)
RUN = [
    (number, figures({"reward/missing_rate": rate, "critic/explained_variance": -1.0}))
    for number, rate in enumerate(RATES)
]


def test_alarms_come_before_advice_with_their_evidence():
    found = findings(Evidence(RUN), [COLD, MISSING])
    assert [finding.name for finding in found] == ["missing", "critic-cold"]
    # although iteration 2 was within the threshold
    assert str(found[0]) == "47% are missing since iteration 1: mend it"
    assert str(found[1]) == "it explains -1.0: warm it up"  # from the first iteration on
    assert found[0].as_json() == {
        "name": "missing",
        "alarm": True,
        "words": "47% are missing",
        "remedy": "mend it",
        "since": 1,
        "evidence": {"missing": pytest.approx(1.4 / 3)},
        "thresholds": {"missing": "above 0.3: by hand"},
    }
    known = [
        (number, values | figures({"actor.update/funnel/moved": 0.1, "actor.update/lr": 3e-4}))
        for number, values in RUN
    ]
    assert str(findings(Evidence(known), [MISSING])[0]).endswith("mend it (now 0.0003)")


def test_a_run_that_has_just_begun_has_no_findings():
    assert findings(Evidence(RUN[: LEAST - 1])) == []
    assert [finding.name for finding in findings(Evidence(RUN)) if finding.alarm] == ["missing"]
    assert findings(Evidence(RUN, {"backend": "null"})) == []
