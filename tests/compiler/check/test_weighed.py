"""Weights of ``*rewards`` reach a flow that asks for them and are refused if they would have no effect."""

import pytest
import torch

from rlflow import PlanError, compare, flow, loss, stage
from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.roles.rewards import unweighted
from rlflow.rewards.reward_spec import parse_reward


@stage(gives="advantages")
def add(advantages, of_reward):
    return advantages + of_reward


@stage(gives="advantages")
def whole(scores, mask):
    return scores[:, None] * mask


@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}


def flow_with(judged):
    @flow
    def own(prompts, actor, *rewards):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        for number, reward in enumerate(rewards):
            batch |= reward(batch)
            batch |= judged(batch, gives="of_reward" if number else "advantages")
            if number:
                batch |= add(batch)
        actor.update(batch, gain)

    return own


def undivided(batch, gives):
    return compare(batch, gives=gives, deviation=False)


@pytest.mark.parametrize(
    ("judged", "weights", "refused"),
    [
        (compare, (1.0, 1.0), []),
        (compare, (1.0, 0.1), ["rewards_1"]),
        (compare, (2.0, -1.0), ["rewards_0", "rewards_1"]),
        (undivided, (1.0, 0.1), []),
        (whole, (1.0, 0.1), []),
    ],
)
def test_a_weight_cancelled_by_a_division_is_refused(judged, weights, refused):
    errors = check(flow_with(judged), None, TraceOptions(2, weights=weights)).errors
    found = [problem for problem in errors if problem.code == "reward-weight"]
    assert [problem.message.split("'")[1] for problem in found] == refused


def test_gdpo_weighs_the_advantages_of_each_reward_by_the_run_weights():
    gdpo = load_flow("gdpo")
    options = TraceOptions(2, weights=(2.0, 0.01))
    program = compile_flow(gdpo, None, options)
    assert check(gdpo, None, options).ok
    assert {
        name: settings["weight"] for name, settings in program.settings.items() if "weight" in settings
    } == {"weigh": 2.0, "add": 0.01}
    assert program.weighed == {"rewards_0", "rewards_1"}
    assert compile_flow(gdpo, None, TraceOptions(2)).weights == {"rewards_0": 1.0, "rewards_1": 1.0}


def test_the_flags_of_a_run_reach_the_flow():
    program = check_flow("gdpo", ["--reward", "task:3", "--reward", "math:0.5"]).program
    assert program.weights == {"rewards_0": 3.0, "rewards_1": 0.5}


def test_scores_weighed_by_the_flow_arrive_without_their_weight():
    specs = (parse_reward("task:3"),)
    assert [spec.weight for spec in unweighted("rewards_0", specs, own=False)] == [1.0]
    with pytest.raises(PlanError, match="cannot see the weight of --rewards_0.reward"):
        unweighted("rewards_0", specs, own=True)
    assert unweighted("rewards_0", (parse_reward("task"),), own=True)


def test_a_small_weight_scales_the_advantages_exactly():
    """Compare with the numbers of the authors' sum of weighted advantages, for two groups of two."""
    from rlflow.algorithms import gdpo

    group, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool)
    one, other = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    advantages = gdpo.add(
        gdpo.weigh(compare(one, group, mask), weight=1.0), compare(other, group, mask), weight=0.01
    )
    unit = 0.5 / (0.5**0.5 + 1e-4)
    torch.testing.assert_close(advantages[:, 0], unit * torch.tensor([0.99, -0.99, 1.01, -1.01]))
