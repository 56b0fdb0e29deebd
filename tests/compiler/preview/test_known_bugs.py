"""Run-time faults of other systems that a plan refuses or that cannot happen here. Each fixture states which."""

import itertools
import re
from pathlib import Path

import pytest

from rlflow.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures"
TWO = "--pools train=2,rollout=2"


def marked(fixture, code):
    """Return the marked line of a fixture."""
    lines = (FIXTURES / f"{fixture}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {code}"))


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_skipping_a_stage_keeps_model_nodes_of_a_pool_apart(planned_as, recompute):
    found = planned_as(f"rlinf_166 --pools all=2 --hp.recompute {recompute}")
    of_models = {step.name for step in found.steps if step.name.partition(".")[0] in ("actor", "reference")}
    assert ("actor.logprobs" in of_models) == (recompute == "true")
    assert {step.lane for step in found.steps if step.name in of_models} == {"all"}
    assert all(pair.lane == "all" for pair in found.pairs if {pair.first, pair.second} <= of_models)
    spans = sorted((span for span in found.time.spans if span.node in of_models), key=lambda span: span.start)
    assert len(spans) == len(of_models) >= 3
    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))


def test_sampling_ahead_on_the_trainers_own_pool_is_refused(planned_as):
    with pytest.raises(PlanError) as refused:
        planned_as(f"slime_180 {TWO} --staleness 1 --actor.generator.pool train")
    [problem] = refused.value.problems
    assert (problem.code, problem.found) == ("staleness", "--staleness 1, both sides on 'train'")
    assert (
        problem.message
        == "the trainer and the generator of role 'actor' alternate on pool 'train', so its rollouts "
        "are never stale"
    )
    assert problem.remedy == "--actor.generator.pool rollout"
    found = planned_as(f"slime_180 {TWO} --staleness 1")
    assert [(each.from_pool, each.to_pool) for each in found.weights] == [("train", "rollout")]


@pytest.mark.parametrize("name", ["miles_1735::corrected", "dapo"])
def test_an_asynchronous_iteration_has_the_synchronous_plan(planned_as, name):
    ahead, strict = (planned_as(f"{name} {TWO} --staleness {bound}") for bound in (1, 0))
    assert (ahead.graph, ahead.steps, ahead.edges) == (strict.graph, strict.steps, strict.edges)


def test_uncorrected_rows_of_older_weights_are_refused_at_their_line(planned_as):
    with pytest.raises(PlanError) as refused:
        planned_as(f"miles_1735::uncorrected {TWO} --staleness 1")
    [problem] = refused.value.problems
    assert (problem.code, problem.place.line) == (
        "stale-uncorrected",
        marked("miles_1735", "stale-uncorrected"),
    )
    assert "batch |= truncated_weights(batch, cap=2.0)" in problem.remedy
    assert "take `weights` and multiply the value by it" in problem.remedy
    planned_as(f"miles_1735::uncorrected {TWO}")  # at 0 there is nothing to correct


def test_a_repeat_that_stays_short_is_warned_about(planned_as):
    found = planned_as("replay_capacity --prompts 8")
    [warning] = found.warnings
    assert (warning.code, warning.place.line) == ("repeat-short", marked("replay_capacity", "repeat-short"))
    assert warning.found == "8 prompts, 3 tries: at most 24 of 64 groups"
    assert "actor.update" in {span.node for span in found.time.spans}
    assert planned_as("replay_capacity --prompts 22").warnings == ()


def test_every_fixture_has_a_test_and_states_its_outcome():
    here = "".join(
        Path(__file__).with_name(name).read_text() for name in ("test_known_bugs.py", "test_fits.py")
    )
    for path in FIXTURES.glob("*.py"):
        assert re.search(rf"\b{path.stem}\b", here)
        assert re.search(r"This cannot happen here|A plan refuses", path.read_text())
