"""Trainers and samplers that disagree."""

import pytest
from keyed import figures

from rlflow.config.options import Options
from rlflow.runs.guards import mismatch_warnings

APART = {"policy/mismatch_factor": 1.2, "policy/mismatch_max": 3.0}


def test_a_sampler_that_differs_from_its_trainer_is_reported():
    (said,) = mismatch_warnings(Options(), figures(APART))
    assert "differ: token probabilities by a mean factor of 1.2 " in said
    assert "by at most 3" in said


@pytest.mark.parametrize(
    "options", [Options(max_mismatch=1.3), Options(staleness=1), Options(backend="null")]
)
def test_a_small_or_intended_difference_is_not_reported(options):
    assert not list(mismatch_warnings(options, figures(APART)))


def test_an_iteration_without_both_sides_is_not_reported():
    assert not list(mismatch_warnings(Options(), {}))


def test_each_of_several_roles_is_named():
    both = {f"{role}/{name}": value for role in ("solver", "verifier") for name, value in APART.items()}
    both["verifier/policy/mismatch_factor"] = 1.0
    (text,) = mismatch_warnings(Options(), figures(both))
    assert text.startswith(
        "trainer and sampler of solver differ: token probabilities by a mean factor of 1.2 "
    )
    (text,) = mismatch_warnings(Options(), figures(APART), "judge")
    assert text.startswith("trainer and sampler of judge differ")
