"""Conditions at their limits."""

import pytest

from rlflow.monitoring.diagnosis.rules import RuleCondition


@pytest.mark.parametrize(
    ("relation", "value", "holds"),
    [
        ("above", 0.5, False),
        ("above", 0.6, True),
        ("below", 0.5, False),
        ("below", 0.4, True),
        ("at most", 0.5, True),
        ("at most", 0.6, False),
    ],
)
def test_a_condition_holds_beyond_its_threshold(relation, value, holds):
    assert RuleCondition("missing", relation, 0.5, "by hand").holds(value) is holds


def test_unknown_values_are_no_evidence():
    assert not any(
        RuleCondition("missing", relation, 0.5, "by hand").holds(None)
        for relation in ("above", "below", "at most")
    )
