"""Settings that switch models and stages of the shipped algorithms on and off."""

import dataclasses

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow

COMPARED = ("grpo", "dapo", "gspo", "cispo", "gmpo", "clip_cov")


def program(name, **settings):
    flow = load_flow(name)
    return compile_flow(flow, dataclasses.replace(flow.parameters.hp, **settings))


def depends(name, **settings):
    """Return the nodes that the policy's update depends on."""
    return program(name, **settings).graph.before("actor.update")


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "remax", "reinforce_pp"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_only_a_kl_coefficient_adds_the_reference(name, beta):
    assert ("reference.logprobs" in depends(name, beta=beta)) == (beta > 0)
    assert any(node.role == "reference" for node in program(name, beta=beta).graph.nodes) == (beta > 0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_grpo_charges_kl_in_its_loss_and_rloo_in_its_scores(beta):
    grpo, rloo = (program(name, beta=beta).graph for name in ("grpo", "rloo"))
    update = grpo.by_name["actor.update"]
    assert ("ref_logprobs" in [item.parameter for item in update.inputs]) == (beta > 0)
    assert dict(update.settings.own)["beta"] == beta
    scores = next(item.column for item in rloo.by_name["compare"].inputs if item.parameter == "scores")
    assert rloo.nodes[scores.node].name == ("charge_kl" if beta else "reward")


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_subtracts_the_group_mean_if_it_has_a_baseline(baseline):
    graph = program("reinforce_pp", baseline=baseline).graph
    scores = next(item.column for item in graph.by_name["charge_kl"].inputs if item.parameter == "scores")
    assert graph.nodes[scores.node].name == ("centre" if baseline else "reward")


@pytest.mark.parametrize("overlong", [0, 8])
def test_dapo_penalises_long_responses_from_a_given_length(overlong):
    assert ("shorten" in depends("dapo", overlong=overlong)) == (overlong > 0)


@pytest.mark.parametrize("name", COMPARED)
def test_grpo_and_its_variants_share_the_advantage_stage(name):
    made = program(name)
    assert made.functions["compare"] is rlflow.compare
    assert made.settings["compare"]["deviation"] is True
    columns = {
        item.parameter: made.graph.nodes[item.column.node].name
        for item in made.graph.by_name["actor.update"].inputs
    }
    assert columns["advantages"] == "compare"


@pytest.mark.parametrize("deviation", [True, False])
def test_grpo_divides_by_the_deviation_if_configured(deviation):
    assert program("grpo", deviation=deviation).settings["compare"] == {"deviation": deviation}
