"""Virtual time: concurrent nodes, the critical path and the lower bound of all schedules."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.passes.prune import prune
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.plan import Plan
from rlflow.compiler.simulate import CriticalNode, simulate
from rlflow.errors import PlanError

SECONDS = {
    Op.GENERATE: 60.0,
    Op.LOGPROBS: 10.0,
    Op.VALUES: 9.0,
    Op.REWARD: 8.0,
    Op.UPDATE: 30.0,
    Op.STAGE: 1.0,
}
FORWARDS = ("actor.logprobs", "reference.logprobs", "critic.values")


def seconds(node):
    return SECONDS[node.op]


def make_plan(*nodes, times, room=None):
    """Build a plan from (queue, numbers of the nodes that it waits for), ranked by these times. Node 0 is the
    data.
    """
    graph = [Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),))]
    for number, (_, before) in enumerate(nodes, 1):
        inputs = tuple(Input(f"x{b}", Column(b, "x")) for b in before)
        graph.append(Node(number, Op.STAGE, f"n{number}", 0, inputs, (Output("x", None, "x"),)))
    plan = prune(Plan(None, Graph("made", tuple(graph), (RowAxis(),)), tuple(range(len(graph)))))
    plan = replace(plan, lane={0: "control"} | {number: lane for number, (lane, _) in enumerate(nodes, 1)})
    return rank(plan, {0: 0.0} | times, room or {})


def test_ppo_on_one_pool_per_role_overlaps_forwards_and_updates(placed, room):
    simulation = simulate(placed("ppo", "a pool for each role"), seconds, room)
    assert simulation.together("reward", *FORWARDS)
    assert simulation.together("actor.update", "critic.update")
    # sampling, a forward, three stages, an update
    assert simulation.makespan == simulation.bound == simulation.longest == 103


def test_two_pools_halve_the_time_of_updates(placed, room):
    simulation = simulate(placed("ppo", "actor beside others"), seconds, room)
    assert simulation.together("actor.update", "critic.update")
    assert simulation.together("actor.logprobs", "reference.logprobs")
    assert not simulation.together("reference.logprobs", "critic.values")


def test_models_on_one_pool_alternate_in_a_valid_order(placed, room):
    plan = placed("ppo", "one pool")
    simulation = simulate(plan, seconds, room)
    models = [span for span in simulation.spans if span.lane == "all"]
    assert all(a.end <= b.start for a, b in pairwise(models))
    assert models[0].node == "actor.generate"
    assert {span.node for span in models[1:4]} == set(FORWARDS)
    assert {span.node for span in models[4:]} == {"actor.update", "critic.update"}
    assert simulation.together("reward", models[1].node)
    for span in simulation.spans:
        assert all(
            simulation.by_name[name].end <= span.start
            for name in span.waits_for
            if name in simulation.by_name
        )


@pytest.mark.parametrize(
    "placement", ["one pool", "rollout beside train", "actor beside others", "a pool for each role"]
)
def test_each_node_runs_once_in_its_queue_for_its_duration(placed, room, placement):
    plan = placed("ppo", placement)
    spans = simulate(plan, seconds, room).spans
    assert {span.node: (span.lane, span.seconds) for span in spans} == {
        node.name: (plan.lane[i], SECONDS[node.op])
        for i in plan.live
        if (node := plan.graph.nodes[i]).op is not Op.DATA
    }
    assert len(spans) == len(plan.live) - 1


def test_the_critical_path_names_the_cause_of_each_wait():
    plan = make_plan(
        ("a", [0]), ("a", [1]), ("a", [1]), ("b", [2]), times={1: 4, 2: 1, 3: 5, 4: 2}, room={"a": 1}
    )
    simulation = simulate(plan, {1: 4, 2: 1, 3: 5, 4: 2}, {"a": 1, "b": 1})
    assert simulation.critical == (
        CriticalNode("n1"),
        CriticalNode("n2", "n1", "node"),
        CriticalNode("n3", "n2", "lane"),
    )
    assert simulation.makespan == simulation.bound == 10
    assert simulation.busy == {"a": 1.0, "b": 0.2}


def test_the_bound_is_the_longest_path_or_the_busiest_queue():
    nodes, times = [("a", [0])] * 4, dict.fromkeys((1, 2, 3, 4), 3)
    for places, bound in ((1, 12), (2, 6), (4, 3), (8, 3)):
        simulation = simulate(make_plan(*nodes, times=times), times, {"a": places})
        assert simulation.bound == simulation.makespan == bound
    assert simulate(make_plan(*nodes, times=times), times, {}).bound == 3  # no limit


def test_a_long_node_runs_after_one_with_longer_successors(room):
    #  n1 ──▶ n4 (9 s, then 1 s);  n2 ──▶ n3 (1 s, then 8 s);  n1 and n2 share a pool
    times = {1: 9, 2: 1, 3: 8, 4: 1}
    plan = make_plan(("all", [0]), ("all", [0]), ("cpu", [2]), ("cpu", [1]), times=times)
    assert simulate(plan, times, room).makespan == 11  # 18 in the opposite order


def test_exclusive_successors_count_by_their_total_time(room):
    nodes = (("rollout", [0]), ("rollout", [0]), ("train", [1]), ("train", [1]), ("io", [2]))
    times = {1: 2, 2: 2, 3: 5, 4: 5, 5: 6}
    assert simulate(make_plan(*nodes, times=times, room=room), times, room).makespan == 12
    # n2 would start first if the rank ignored exclusive nodes
    assert simulate(make_plan(*nodes, times=times), times, room).makespan == 14


def test_an_unrolled_plan_is_a_valid_plan(placed, room):
    """Unroll two iterations of PPO: the second samples only after the update of the actor."""
    one = placed("ppo", "actor beside others")
    count = len(one.graph.nodes)
    later = [
        replace(
            node,
            id=node.id + count,
            name=f"{node.name}@1",
            inputs=tuple(
                Input(item.parameter, Column(item.column.node + count, item.column.name))
                for item in node.inputs
            ),
        )
        for node in one.graph.nodes
    ]
    unrolled = Plan(
        one.program,
        replace(one.graph, nodes=(*one.graph.nodes, *later)),
        tuple(range(2 * count)),
        lane=one.lane | {i + count: lane for i, lane in one.lane.items()},
    )
    simulation = simulate(rank(unrolled, room=room), seconds, room)
    alone = simulate(one, seconds, room)
    assert simulation.by_name["actor.generate@1"].start >= simulation.by_name["actor.update"].end
    assert alone.makespan < simulation.makespan <= 2 * alone.makespan


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_every_node_needs_a_duration(wrong):
    plan = make_plan(("a", [0]), ("a", [1]), times={1: 1, 2: 1})
    with pytest.raises(PlanError, match=r"n2 \("):
        simulate(plan, {1: 1.0, 2: wrong}, {})
    with pytest.raises(PlanError, match=r"n2 \(nan\)"):
        simulate(plan, {1: 1.0}, {})


def test_a_node_that_can_never_start_is_named():
    plan = make_plan(("a", [0]), ("b", [1]), ("b", [2]), times={1: 1, 2: 1, 3: 1})
    with pytest.raises(PlanError, match="n2, n3"):
        simulate(plan, {1: 1, 2: 1, 3: 1}, {"b": 0})


def test_the_search_finds_schedules_with_an_idle_slot(optimum):
    """n2 could start at once, but waiting for n3 is shorter."""
    plan = make_plan(("b", [0]), ("a", [0]), ("a", [1]), ("b", [3]), times={1: 1, 2: 9, 3: 1, 4: 9})
    times, room = {1: 1, 2: 9, 3: 1, 4: 9}, {"a": 1, "b": 1}
    assert optimum(plan, times, room) == 11
    assert simulate(plan, times, room).makespan == 19


@st.composite
def random_plan(draw):
    """Draw up to 7 nodes in two queues with integer durations, and the slots of the queues."""
    count = draw(st.integers(1, 7))
    before = [draw(st.sets(st.integers(0, i), min_size=1, max_size=2)) for i in range(count)]
    nodes = [(draw(st.sampled_from("ab")), sorted(waits)) for waits in before]
    times = {i: float(draw(st.integers(1, 9))) for i in range(1, count + 1)}
    room = {"a": draw(st.integers(1, 2)), "b": 1}
    return make_plan(*nodes, times=times, room=room), times, room


@settings(deadline=None, max_examples=60)
@given(random_plan())
def test_the_optimum_is_between_the_bound_and_any_schedule(optimum, case):
    plan, times, room = case
    simulation = simulate(plan, times, room)
    assert simulation.bound <= optimum(plan, times, room) + 1e-9 <= simulation.makespan + 2e-9
    assert simulation.makespan <= sum(times.values()), "there is always something that runs"
    assert sum(simulation.by_name[step.node].seconds for step in simulation.critical) == pytest.approx(
        simulation.makespan
    )
