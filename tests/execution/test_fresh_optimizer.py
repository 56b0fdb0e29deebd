"""``update(…, fresh_optimizer=…)``: when the optimizer of a role is reset."""

import pytest
import torch

from rlflow import ALL, RANK0, FlowError, flow, loss, row, scalar, stage
from rlflow.compiler.graph.model import FRESH_OPTIMIZER
from rlflow.compiler.trace.compile import compile_flow


@loss
def likelihood(new):
    return -new.logprobs, {}


@stage(gives={"restart": scalar("bool")}, dispatch=RANK0)
def odd(iteration):
    return iteration % 2 == 1


@stage(gives={"level": scalar("float32")}, dispatch=RANK0)
def falling(level):
    return (level - 1).clamp(min=0)


@stage(gives={"restart": row("bool")})
def by_row(scores):
    return scores > 0


@stage(gives={"restart": scalar("bool")}, dispatch=ALL)
def by_rank(scores):
    return torch.tensor(True)


@stage(gives={"restart": scalar("float32")}, dispatch=RANK0)
def number(scores):
    return scores.mean()


@pytest.fixture
def resets(world, learner):
    """After how many updates a flow resets an optimizer, run both ways."""

    def run(made, iterations=6):
        found = []
        for way in ("eager", "compiled"):
            numbers = []

            class Resetting(learner):
                def reset_optimizer(self, numbers=numbers):
                    numbers.append(len(self.learned))

            one = world(made, trainer=Resetting)
            for _ in range(iterations):
                getattr(one, way)(3)
            found.append(numbers)
        assert found[0] == found[1]
        return found[0]

    return run


def test_the_optimizer_is_reset_before_the_update_where_the_column_is_true(resets):
    @flow
    def alternating(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= odd(batch)
        actor.update(batch, likelihood, fresh_optimizer="restart")
        actor.update(batch, likelihood)

    assert resets(alternating) == [2, 6, 10]


def test_a_column_that_is_none_resets_nothing(resets):
    @flow
    def rarely(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= odd(batch, every=3)
        actor.update(batch, likelihood, fresh_optimizer="restart", every=1)

    assert resets(rarely) == [3]


def test_a_state_resets_while_it_is_not_zero(resets):
    @flow(state=lambda hp: {"level": 2.0})
    def stateful(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, likelihood, fresh_optimizer="level")
        falling(batch)

    assert resets(stateful) == [0, 1]


def test_the_column_is_an_input_of_the_update_and_not_of_its_loss():
    @flow
    def reading(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= odd(batch)
        actor.update(batch, likelihood, fresh_optimizer="restart")

    program = compile_flow(reading)
    update = program.graph.by_name["actor.update"]
    assert [item.column.name for item in update.inputs if item.parameter == FRESH_OPTIMIZER] == ["restart"]
    assert "fresh_optimizer" not in dict(update.shown)
    assert program.settings["actor.update"] == {}


@pytest.mark.parametrize(
    ("giver", "value", "code"),
    [
        (by_row, "restart", "wrong-kind"),
        (by_rank, "restart", "wrong-kind"),
        (number, "restart", "wrong-kind"),
        (number, "nothing", "missing-column"),
        (number, True, "setting-range"),
    ],
)
def test_it_must_name_one_bool_for_all_ranks(giver, value, code):
    @flow
    def wrong(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= giver(batch)
        actor.update(batch, likelihood, fresh_optimizer=value)

    with pytest.raises(FlowError) as error:
        compile_flow(wrong)
    assert {problem.code for problem in error.value.problems} == {code}
