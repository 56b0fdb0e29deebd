"""Sets of nodes that are due together, and the graph of the iterations in which only these are due."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import TESTS

from rlflow import buffer, flow, loss
from rlflow.author.load import load
from rlflow.author.schedule import ALWAYS, CallSchedule
from rlflow.compiler.graph.due import MOST_SETS, due_sets, idle_in, narrowed, schedules
from rlflow.compiler.graph.model import Column, Graph, Node, Op, RowAxis
from rlflow.compiler.graph.wire import identity, pack, unpack
from rlflow.compiler.trace.compile import compile_flow
from rlflow.errors import PlanError


@loss
def plain_loss(new, scores):
    return -new.logprobs * scores[:, None], {}


SCHEDULED = compile_flow(load(TESTS / "execution" / "flows.py").scheduled).graph


def graph_of(*schedules):
    nodes = [Node(i, Op.STAGE, f"s{i}", 0, schedule=each) for i, each in enumerate(schedules)]
    return Graph("made", tuple(nodes), (RowAxis(),))


@given(st.lists(st.builds(CallSchedule, st.integers(1, 6), st.integers(0, 7)), max_size=5))
def test_the_sets_are_those_of_one_iteration_after_another(drawn):
    end = max((each.after for each in drawn), default=0) + 2 * math.lcm(*(each.every for each in drawn))
    oracle = [frozenset(f"s{n}" for n, each in enumerate(drawn) if not each.due(i)) for i in range(end)]
    cycle = oracle[end - math.lcm(*(each.every for each in drawn)) :]
    if len(set(oracle)) > MOST_SETS:
        return
    assert {each.idle: (each.first, each.share) for each in due_sets(graph_of(*drawn))} == {
        idle: (oracle.index(idle), cycle.count(idle) / len(cycle)) for idle in oracle
    }


def test_too_many_sets_are_a_plan_error_that_names_the_schedules():
    primes = [CallSchedule(every) for every in (2, 3, 5, 7, 11, 13)]
    with pytest.raises(PlanError, match="more than 64 of them, from s0: every=2, s1: every=3"):
        due_sets(graph_of(*primes, CallSchedule(after=5)))
    with pytest.raises(PlanError, match="a cycle of"):
        due_sets(graph_of(CallSchedule(2), CallSchedule(100_003), CallSchedule(100_019)))


def test_rare_calls_with_a_long_cycle_have_few_sets():
    assert len(due_sets(graph_of(CallSchedule(1000), CallSchedule(1001), CallSchedule(after=10**7)))) == 8


def test_a_graph_without_schedules_has_one_set_and_stays_as_it_is():
    graph = graph_of(ALWAYS)
    (only,) = due_sets(graph)
    assert (only.idle, only.first, only.share) == (frozenset(), 0, 1.0)
    assert narrowed(graph, only.idle).graph == graph


def test_an_idle_node_gives_no_columns_and_its_readers_do_not_wait_for_it():
    part = narrowed(SCHEDULED, {"critic.values", "critic.update"})
    values, maybe = SCHEDULED.by_name["critic.values"], part.graph.by_name["maybe"]
    assert part.idle == {values.id: values} | {n.id: n for n in SCHEDULED.nodes if n.name == "critic.update"}
    assert part.gone == {Column(values.id, "values")}
    assert "values" in {item.parameter for item in SCHEDULED.by_name["maybe"].inputs}
    assert "values" not in {item.parameter for item in maybe.inputs}
    assert values.id not in part.graph.order.predecessors(maybe.id)


def test_a_state_keeps_its_value_if_the_stage_that_sets_it_is_idle():
    part = narrowed(SCHEDULED, {"move_bar"})
    reader = part.graph.by_name["below"]
    assert Column(SCHEDULED.by_name["state"].id, "bar") in {item.column for item in reader.inputs}
    assert part.graph.state[0].final == Column(SCHEDULED.by_name["state"].id, "bar")


def test_choose_and_concat_follow_the_rows_that_they_need():
    part = narrowed(SCHEDULED, {"actor.generate#2", "reward#2", "actor.logprobs#2", "below", "repeat.body"})
    assert {part.idle[i].name for i in part.idle} >= {"choose", "concat"}
    assert part.graph.by_name["choose"].op is Op.IDLE


def test_a_put_follows_the_rows_that_it_stores_and_a_draw_does_not():
    @flow(keeps=lambda hp: {"past": buffer(rows=8)})
    def replay(prompts, actor, reward, past):
        old = past.draw()
        batch = actor.generate(prompts, samples=2, max_tokens=4, every=2)
        batch |= reward(batch, every=2)
        past.put(batch)
        actor.update(old, plain_loss)

    graph = compile_flow(replay).graph
    part = narrowed(graph, {"actor.generate", "reward"})
    idle = {node.name for node in part.idle.values()}
    assert "past.put" in idle
    assert not idle & {"past.draw", "actor.update"}


def test_a_column_of_joined_rows_is_none_if_one_part_lacks_it():
    part = narrowed(SCHEDULED, {"maybe#2"})
    joined = part.graph.by_name["concat"]
    assert "advantages" not in {output.name for output in joined.outputs}
    assert "tokens" in {output.name for output in joined.outputs}
    assert part.lacking.keys() == {SCHEDULED.by_name["actor.update"].id}


def test_a_repeat_lacks_the_columns_that_its_body_does_not_compute():
    part = narrowed(SCHEDULED, {"extra"})
    (repeat,) = part.bodies
    assert Column(repeat, "extra") in part.gone
    assert "extra" not in {output.name for output in part.graph.nodes[repeat].outputs}


def test_updates_stay_in_order_if_the_one_between_them_is_idle():
    first, between, last = (
        SCHEDULED.by_name[name].id for name in ("actor.update", "actor.update#2", "actor.update#3")
    )
    order = narrowed(SCHEDULED, {"actor.update#2"}).graph.order
    assert order.has_edge(first, last)
    assert not list(order.successors(between))


def test_schedules_are_part_of_a_graph_and_of_its_identity():
    assert unpack(pack(SCHEDULED)) == SCHEDULED
    assert schedules(SCHEDULED)["critic.values"] == CallSchedule(2)
    assert schedules(SCHEDULED)["extra"] == CallSchedule(4, 1)
    assert "maybe" in idle_in({"maybe": CallSchedule(2)}, 1)
    nodes = tuple(
        dataclasses.replace(n, schedule=CallSchedule(3)) if n.name == "critic.values" else n
        for n in SCHEDULED.nodes
    )
    assert identity(dataclasses.replace(SCHEDULED, nodes=nodes)) != identity(SCHEDULED)
