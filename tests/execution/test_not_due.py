"""Calls that aren't due in an iteration: eager and compiled flows leave out the same work."""

import re

import pytest
import torch
from keyed import keyed

from rlflow import FlowError, choose, concat, flow, loss, stage
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.schedule import CallSchedule
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.execution.account import RowOutcome
from rlflow.execution.not_due import none_of, present, without_rows

CYCLE = 13  # iterations, one more than a cycle of the flow ``scheduled``


def test_eager_and_compiled_agree_in_each_iteration_of_a_cycle(world, flows, eager_metrics):
    eager, compiled = world(flows.scheduled), world(flows.scheduled)
    for _ in range(CYCLE):
        eager.eager(4)
        assert compiled.compiled(4).metrics == pytest.approx(eager_metrics, nan_ok=True)
        assert compiled.learned == eager.learned
        assert compiled.engine.state == eager.engine.state
        assert compiled.stream.position == eager.stream.position
        assert not compiled.executor.store.columns


def test_only_due_nodes_take_time_and_report_metrics(world, flows):
    run, made = world(flows.scheduled), plan(compile_flow(flows.scheduled))
    for iteration in range(4):
        outcome = run.compiled(4)
        idle = {name for name, schedule in made.schedules.items() if not schedule.due(iteration)}
        assert idle
        assert not idle & {span.node for span in outcome.spans}
        assert not idle & {name.partition("/")[0] for name in keyed(outcome.metrics)}
        assert ("critic.update" in {span.node for span in outcome.spans}) == (iteration % 2 == 0)


def test_rows_whose_update_is_not_due_are_counted_with_its_schedule(world, flows):
    run = world(flows.scheduled)
    ends = [
        {
            (end.node, end.setting)
            for _, end in run.compiled(4).account.ends
            if end.cause == "the update is not due yet"
        }
        for _ in range(2)
    ]
    assert ends == [set(), set()]  # each row is also learned from by an update that is due

    @flow
    def rarely(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, likelihood, every=2, after=1)

    run = world(rarely)
    first, second = (
        {(end.fate, end.node, end.setting) for _, end in run.compiled(4).account.ends} for _ in range(2)
    )
    assert first == {(RowOutcome.LEFT_OUT, "actor.update", "every=2, after=1")}
    assert second == {(RowOutcome.TRAINED, "actor.update", "")}


@loss
def likelihood(new):
    return -new.logprobs, {}


@stage(gives="advantages")
def spread(scores, mask):
    return torch.where(mask, scores[:, None], 0.0)


@loss
def weighted(new, advantages):
    return -new.logprobs * advantages, {}


@flow
def without_column(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch, every=2)
    batch |= spread(batch)
    actor.update(batch, weighted)


@flow
def without_made_rows(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4, every=2)
    batch |= reward(batch, every=2)
    batch |= spread(batch, every=2)
    actor.update(batch, weighted)


@flow
def without_part(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    more = actor.generate(prompts, samples=2, max_tokens=4, every=2)
    actor.update(concat(batch, more), likelihood)


@pytest.mark.parametrize(
    ("wrong", "code", "message"),
    [
        (without_column, "column-not-due", "stage 'spread' reads scores, which is None in this iteration"),
        (without_made_rows, "rows-not-due", "actor.update works on rows that nothing makes"),
        (without_part, "rows-not-due", "actor.update works on rows that nothing makes"),
    ],
)
def test_eager_and_compiled_refuse_what_is_not_there_with_one_code(world, wrong, code, message):
    with pytest.raises(FlowError, match=re.escape("in iterations 1, 3, 5, …")) as traced:
        compile_flow(wrong)
    assert {problem.code for problem in traced.value.problems} == {code}
    run = world(wrong)
    run.eager(3)
    with pytest.raises(FlowError, match=message) as eager:
        run.eager(3)
    assert {problem.code for problem in eager.value.problems} == {code}


@pytest.mark.parametrize("bad", [{"every": 0}, {"every": 2.0}, {"after": -1}])
@pytest.mark.parametrize("call", ["generate", "reward", "stage", "update"])
def test_a_schedule_must_be_whole_numbers_in_every_call(world, call, bad):
    settings = {name: {} for name in ("generate", "reward", "stage", "update")} | {call: bad}

    @flow
    def mistaken(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4, **settings["generate"])
        batch |= reward(batch, **settings["reward"])
        batch |= spread(batch, **settings["stage"])
        actor.update(batch, weighted, **settings["update"])

    for attempt in (lambda: compile_flow(mistaken), lambda: world(mistaken).eager(2)):
        with pytest.raises(FlowError) as error:
            attempt()
        assert {problem.code for problem in error.value.problems} == {"setting-range"}


def test_a_stage_with_a_setting_of_that_name_gets_it(world):
    @stage(gives="advantages")
    def own(scores, mask, *, every):
        return torch.where(mask, scores[:, None] * every, 0.0)

    @flow
    def with_own(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= own(batch, every=3)
        actor.update(batch, weighted)

    program = compile_flow(with_own)
    assert program.graph.by_name["own"].schedule == CallSchedule()
    assert program.settings["own"] == {"every": 3}
    eager, compiled = world(with_own), world(with_own)
    for _ in range(2):
        eager.eager(2)
        compiled.compiled(2)
    assert eager.learned == compiled.learned


def test_columns_of_a_call_that_is_not_due_are_none_through_every_step():
    batch = Batch.of(scores=[0.1, 0.2, 0.3])
    batch |= Batch(batch.axis, none_of({"values": Kind(Level.TOKEN, "float32")}))
    assert batch["values"] is None
    assert batch.rows([0, 2])["values"] is None
    assert batch.chunk(2)[1]["values"] is None
    assert Batch.concat([batch, batch])["values"] is None
    assert batch.repeat(2)["values"] is None
    assert batch.data["values"].nbytes == 0
    assert "values" not in present("a call", batch, ("values",), optional=("values",))
    with pytest.raises(FlowError, match="a call reads values"):
        present("a call", batch, ("values",))


def test_rows_that_are_not_made_keep_scalars_and_may_be_merged_upwards():
    batch = Batch.of(scores=[0.1, 0.2], beta=0.5)
    rows = without_rows(batch, ("tokens",))
    assert (len(rows), rows["scores"], rows["tokens"], float(rows["beta"])) == (0, None, None, 0.5)
    assert not rows.axis.made
    assert not rows.axis.take(torch.zeros(0, dtype=torch.int64)).made
    assert (batch | rows.select("tokens"))["tokens"] is None
    assert Axis.fresh(2).made
    with pytest.raises(FlowError, match="a call works on rows that nothing makes"):
        present("a call", rows, ())


def test_choosing_by_a_column_that_is_none_makes_no_rows(world):
    @flow
    def choosing(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch, every=2)
        best = choose(batch, top="scores", count=2)
        actor.update(best, likelihood, every=2)
        actor.update(batch, likelihood)

    eager, compiled = world(choosing), world(choosing)
    for _ in range(3):
        eager.eager(3)
        compiled.compiled(3)
    assert eager.learned == compiled.learned
    assert len(eager.learned["actor"]) == 5


def test_data_that_are_none_have_no_values():
    assert Data(Kind(Level.ROW, "float32"), None).padded(Axis.fresh(2)) is None
