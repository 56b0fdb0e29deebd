"""The scheduler: events in, instructions out. Graphs are drawn; time is virtual."""

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.node_options import NodeOptions, UpdateOptions
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.passes.lanes import lanes
from rlflow.compiler.passes.prune import prune, reuse
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.plan import Plan
from rlflow.compiler.scheduler import Finish, Free, Scheduler, StartNode

ROOM = {"model": 1, "cpu": 2, "io": 8}
OPS = {"s": Op.STAGE, "l": Op.LOGPROBS, "g": Op.GENERATE, "r": Op.REWARD, "u": Op.UPDATE}
SETTINGS = {"u": UpdateOptions()}


def drawn(text: str) -> Plan:
    """A plan from lines ``name = what(inputs)``; what: s stage, l log-probs, g generate, r reward, u update.
    The first node is the data. Every node but an update gives the column ``x``."""
    nodes = [Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),))]
    number = {"data": 0}
    for line in text.strip().splitlines():
        name, _, call = (part.strip() for part in line.partition("="))
        what, _, names = call.rstrip(")").partition("(")
        inputs = tuple(
            Input(f"x{i}", Column(number[n.strip()], "x"))
            for i, n in enumerate(names.split(","))
            if n.strip()
        )
        outputs = () if what == "u" else (Output("x", None, "x"),)
        role = {"u": "actor", "l": "actor", "g": "actor"}.get(what)
        number[name] = len(nodes)
        nodes.append(
            Node(
                len(nodes), OPS[what], name, 0, inputs, outputs, SETTINGS.get(what, NodeOptions()), role=role
            )
        )
    return passed(nodes)


def passed(nodes) -> Plan:
    made = Plan(None, Graph("drawn", tuple(nodes), (RowAxis(),)), tuple(node.id for node in nodes))
    for step in (prune, lanes, rank, reuse):
        made = step(made)
    return made


def said(plan: Plan, instructions) -> str:
    """Instructions as a line: +start -freed ., and ! after a failure."""
    words = []
    for instruction in instructions:
        if isinstance(instruction, StartNode):
            words.append("+" + plan.graph.nodes[instruction.node].name)
        elif isinstance(instruction, Free):
            words += ["-" + plan.graph.nodes[column.node].name for column in instruction.columns]
        else:
            words.append("!" if instruction.failed else ".")
    return " ".join(words)


class Told:
    """A scheduler that is told names and answers in words."""

    def __init__(self, text, room=None):
        self.plan = drawn(text)
        self.scheduler = Scheduler(self.plan, ROOM if room is None else room)

    def begin(self):
        return self._said(self.scheduler.begin())

    def done(self, name):
        return self._said(self.scheduler.done(self.plan.graph.by_name[name].id))

    def failed(self, name):
        return self._said(self.scheduler.failed(self.plan.graph.by_name[name].id))

    def _said(self, instructions):
        self.scheduler.validate()
        return said(self.plan, instructions)


PPO = """
    rollout = g(data)
    score   = r(rollout)
    old     = l(rollout)
    ref     = l(rollout)
    charge  = s(score, old, ref)
    learn   = u(charge, rollout)
"""


def test_what_does_not_depend_on_each_other_runs_side_by_side():
    told = Told(PPO, room={})
    told.begin()
    told.done("data")
    assert set(told.done("rollout").split()) >= {"+score", "+old", "+ref"}


def test_model_stages_take_turns_and_rewards_run_beside_them():
    told = Told(PPO)
    told.begin()
    told.done("data")
    assert told.done("rollout") == "-data +old +score"
    assert told.done("old") == "+ref"
    assert told.done("score") == ""
    assert told.done("ref") == "+charge"


def test_a_column_is_freed_when_its_last_reader_is_done():
    told = Told(PPO, room={})
    assert told.begin() == "+data"
    assert told.done("data") == "+rollout"
    assert told.done("rollout") == "-data +old +ref +score"
    assert [told.done(name) for name in ("score", "old")] == ["", ""]
    assert told.done("ref") == "+charge"
    assert told.done("charge") == "-score -old -ref +learn"
    assert told.done("learn") == "-rollout -charge ."


def test_a_node_whose_turn_is_after_another_waits_for_it_though_a_place_is_free():
    plan = drawn(PPO)
    old, ref = (plan.graph.by_name[name].id for name in ("old", "ref"))
    told = Told(PPO, room={})
    told.plan = replace(plan, turns={ref: old})
    told.scheduler = Scheduler(told.plan, {})
    assert told.plan.waits_for[ref] == plan.waits_for[ref] | {old}
    assert "old" in told.plan.names_before(ref)
    told.begin()
    told.done("data")
    assert set(told.done("rollout").split()) == {"-data", "+score", "+old"}
    assert told.done("old") == "+ref"


def test_the_longest_remaining_path_starts_first():
    told = Told("""
        short = l(data)
        long  = l(data)
        more  = l(long)
        end   = u(short, more)
    """)
    told.begin()
    assert told.done("data") == "+long"
    assert told.done("long") == "+short"  # as long as `more`, and written before it


def test_ties_go_in_program_order():
    told = Told("""
        first  = l(data)
        second = l(data)
        end    = u(first, second)
    """)
    told.begin()
    assert told.done("data") == "+first"


def test_after_a_failure_nothing_starts_and_all_is_freed_when_the_last_node_has_ended():
    told = Told(PPO)
    told.begin()
    told.done("data")
    told.done("rollout")
    assert told.failed("old") == ""
    assert told.scheduler.running == {told.plan.graph.by_name["score"].id}
    assert told.done("score") == "-rollout -score !"


def test_a_second_failure_changes_nothing():
    told = Told(PPO, room={})
    told.begin()
    told.done("data")
    told.done("rollout")
    told.failed("old")
    told.failed("score")
    assert told.failed("ref") == "-rollout !"


def test_a_failure_of_the_only_node_ends_at_once():
    told = Told("end = u(data)")
    told.begin()
    told.done("data")
    assert told.failed("end") == "-data !"


def test_what_nothing_needs_is_not_run():
    plan = drawn("""
        used   = l(data)
        unused = l(data)
        end    = u(used)
    """)
    assert [plan.graph.nodes[i].name for i in plan.live] == ["data", "used", "end"]
    assert str(plan.notes[0]) == "prune: 2 of 3 columns are read; dropped unused"


def test_an_update_begins_with_the_last_forward_of_its_role():
    plan = drawn("""
        old = l(data)
        new = l(data, old)
        end = u(new)
        too = l(data, end)
        two = u(too)
    """)
    assert {plan.graph.nodes[i].name: rows for i, rows in plan.ahead.items()} == {"new": math.inf}
    assert str(plan.notes[-1]) == "reuse: end reuses new"


@pytest.mark.parametrize(
    "end", [{"role": "critic"}, {"axis": 1}, {"rows": "group"}, {"op": Op.STAGE, "pure": False}]
)
def test_an_update_of_others_begins_with_nothing(end):
    new = Node(
        1, Op.LOGPROBS, "new", 0, (Input("x", Column(0, "x")),), (Output("x", None, "x"),), role="actor"
    )
    last = Node(
        **{
            "id": 2,
            "op": Op.UPDATE,
            "name": "end",
            "axis": 0,
            "inputs": (Input("x", Column(1, "x")),),
            "role": "actor",
        }
        | end
    )
    assert passed([Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),)), new, last]).ahead == {}


def test_a_column_that_nothing_reads_is_not_kept():
    node = Node(
        1,
        Op.STAGE,
        "two",
        0,
        (Input("x", Column(0, "x")),),
        (Output("read", None, "read"), Output("unread", None, "unread")),
    )
    end = Node(2, Op.UPDATE, "end", 0, (Input("x", Column(1, "read")),), role="actor")
    plan = passed([Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),)), node, end])
    assert plan.keeps(node) == ("read",)


def test_what_the_run_records_is_held_to_the_end():
    generate = Node(
        1,
        Op.GENERATE,
        "rollout",
        0,
        (Input("x", Column(0, "x")),),
        (Output("completion", None, "completion"),),
        role="actor",
    )
    end = Node(2, Op.UPDATE, "end", 0, (Input("x", Column(1, "completion")),), role="actor")
    plan = passed([Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),)), generate, end])
    scheduler = Scheduler(plan, ROOM)
    scheduler.begin()
    scheduler.done(0)
    scheduler.done(1)
    assert scheduler.done(2) == [Free((Column(1, "completion"),)), Finish()]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_lane_holds_its_limit(limit):
    names = [f"s{i}" for i in range(5)]
    told = Told(
        "\n".join([*(f"{name} = s(data)" for name in names), f"end = u({', '.join(names)})"]),
        room={"cpu": limit},
    )
    told.begin()
    assert told.done("data") == " ".join(f"+s{i}" for i in range(limit))


# -- any graph, in virtual time
# ----------------------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    """Up to 12 nodes of any kind on any earlier columns, and an update at the end that reads the last."""
    kinds = draw(st.lists(st.sampled_from("slgr"), min_size=1, max_size=11))
    nodes = [Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),))]
    for kind in [*kinds, "u"]:
        number = len(nodes)
        before = draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=3)) | (
            {number - 1} if kind == "u" else set()
        )
        role = draw(st.sampled_from(["actor", "critic"])) if kind in "lgu" else None
        outputs = () if kind == "u" else (Output("x", None, "x"), Output("y", None, "y"))
        names = sorted((b, draw(st.sampled_from("xy") if b else st.just("x"))) for b in before)
        inputs = tuple(Input(f"p{b}", Column(b, name)) for b, name in names)
        nodes.append(
            Node(
                number,
                OPS[kind],
                f"n{number}",
                0,
                inputs,
                outputs,
                SETTINGS.get(kind, NodeOptions()),
                role=role,
            )
        )
    return passed(nodes)


def simulated(plan, room, durations, fails=None):
    """Run a plan in virtual time; yields after each event what has started, ended, is stored, and whether it
    is over."""
    scheduler = Scheduler(plan, room)
    now, events, order = 0, [], []
    started, ended, stored, over = [], set(), set(), None
    instructions = scheduler.begin()
    while True:
        for instruction in instructions:
            if isinstance(instruction, StartNode):
                node = plan.graph.nodes[instruction.node]
                assert {item.column for item in node.inputs} <= stored, (
                    "a node starts with its inputs in store"
                )
                assert plan.waits_for[node.id] <= ended, "never before what it waits for"
                started.append(node.id)
                order.append(node.name)
                heapq.heappush(events, (now + durations[node.id % len(durations)], node.id))
            elif isinstance(instruction, Free):
                assert set(instruction.columns) <= stored, "only what is stored is freed"
                stored -= set(instruction.columns)
            else:
                over = instruction
        scheduler.validate()
        yield started, ended, stored, over
        if over:
            return
        now, node = heapq.heappop(events)
        if node == fails:
            instructions = scheduler.failed(node)
        else:
            ended.add(node)
            stored |= {Column(node, name) for name in plan.keeps(plan.graph.nodes[node])}
            instructions = scheduler.done(node)


DURATIONS = st.lists(st.integers(1, 9), min_size=1, max_size=13)
ROOMS = st.fixed_dictionaries({"model": st.integers(1, 2), "cpu": st.integers(1, 3), "io": st.integers(1, 3)})


@settings(deadline=None)
@given(plans(), ROOMS, DURATIONS)
def test_every_node_runs_once_and_everything_is_freed(plan, room, durations):
    for started, ended, stored, over in simulated(plan, room, durations):
        assert len(started) == len(set(started))
        readers_left = {c for c, readers in plan.readers.items() if readers - ended} | plan.held_to_end
        assert over or stored <= readers_left, "a column is freed at its last reader"
    assert over == Finish(False)
    assert set(started) == ended == set(plan.live)
    assert not stored


@settings(deadline=None)
@given(plans(), ROOMS, DURATIONS, st.data())
def test_everything_is_freed_after_a_failure_too(plan, room, durations, data):
    fails = data.draw(st.sampled_from([i for i in plan.live if i]))
    started, ended, stored, over = list(simulated(plan, room, durations, fails))[-1]
    assert not {node for node in started if fails in plan.waits_for[node]}
    assert over == Finish(True)
    assert fails not in ended
    assert not stored
