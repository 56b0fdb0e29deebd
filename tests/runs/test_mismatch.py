"""Trainer and sampler that disagree."""

import pytest

from rlflow.config.options import Options
from rlflow.runs.guards import Guard, mismatch_warnings

APART = {"policy/mismatch_factor": 1.2, "policy/mismatch_max": 3.0}


def test_a_sampler_that_differs_from_its_trainer_is_told_of():
    (said,) = mismatch_warnings(Options(), APART)
    assert "differ by a factor of 1.2 on a token" in said
    assert "by 3 at most" in said


@pytest.mark.parametrize("options", [Options(max_mismatch=1.3), Options(staleness=1), Options(backend="null")])
def test_nothing_is_said_of_what_is_small_or_meant(options):
    assert not list(mismatch_warnings(options, APART))


def test_nothing_is_said_of_an_iteration_without_both():
    assert not list(mismatch_warnings(Options(), {}))


def test_each_of_several_roles_is_named():
    both = {f"{role}/{name}": value for role in ("solver", "verifier") for name, value in APART.items()}
    both["verifier/policy/mismatch_factor"] = 1.0
    (text,) = mismatch_warnings(Options(), both)
    assert text.startswith("trainer and sampler of solver differ by a factor of 1.2 on a token")
    (text,) = mismatch_warnings(Options(), APART, "judge")
    assert text.startswith("trainer and sampler of judge differ")


def test_each_cause_of_missing_rewards_is_said_once_and_not_where_the_run_stops_for_them():
    asked = []
    guard = Guard(Options(max_missing=0.5), lambda: asked.append(1) or {"f/none": "f.py:1: None", "f/nan": "x" * 1000})
    some = {"reward/missing": 3.0, "reward/missing_f/none": 2.0, "reward#2/missing_f/none": 1.0, "reward/missing_rate": 0.25}
    (said,) = guard.missing_warnings(some)
    assert said.startswith("3 rewards are missing, and their rows are left out: f/none: f.py:1: None")
    assert list(guard.missing_warnings(some)) == []
    assert list(guard.missing_warnings({"reward/missing": 0.0, "reward/missing_f/nan": 0.0, "reward/missing_rate": 0.0})) == []
    assert list(guard.missing_warnings({"reward/missing_f/nan": 6.0, "reward/missing_rate": 0.75})) == []
    assert asked == [1]
    (said,) = guard.missing_warnings({**some, "reward/missing_f/nan": 1.0})
    assert "x" * 300 in said
    assert len(said) < 500
