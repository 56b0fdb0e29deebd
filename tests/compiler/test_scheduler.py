"""The scheduler: events in, instructions out. Plans are written as lines or drawn at random; time is virtual."""

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.node_options import NodeOptions, UpdateOptions
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.passes.prune import prune, reuse
from rlflow.compiler.passes.queues import queues
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.plan import Plan
from rlflow.compiler.scheduler import Finish, Free, Scheduler, StartNode

ROOM = {"model": 1, "cpu": 2, "io": 8}
OPS = {"s": Op.STAGE, "l": Op.LOGPROBS, "g": Op.GENERATE, "r": Op.REWARD, "u": Op.UPDATE}
SETTINGS = {"u": UpdateOptions()}


def plan_of(text: str) -> Plan:
    """Build a plan from lines ``name = kind(inputs)``; kind: s stage, l log-probs, g generate, r reward, u
    update. The first node is the data. Every node except an update gives the column ``x``.
    """
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
    for step in (prune, queues, rank, reuse):
        made = step(made)
    return made


def shown(plan: Plan, instructions) -> str:
    """Return the instructions as a line: +start -freed ., and ! after a failure."""
    words = []
    for instruction in instructions:
        if isinstance(instruction, StartNode):
            words.append("+" + plan.graph.nodes[instruction.node].name)
        elif isinstance(instruction, Free):
            words += ["-" + plan.graph.nodes[column.node].name for column in instruction.columns]
        else:
            words.append("!" if instruction.failed else ".")
    return " ".join(words)


class NamedScheduler:
    """A scheduler with node names as events and lines of text as instructions."""

    def __init__(self, text, room=None):
        self.plan = plan_of(text)
        self.scheduler = Scheduler(self.plan, ROOM if room is None else room)

    def begin(self):
        return self._shown(self.scheduler.begin())

    def done(self, name):
        return self._shown(self.scheduler.done(self.plan.graph.by_name[name].id))

    def failed(self, name):
        return self._shown(self.scheduler.failed(self.plan.graph.by_name[name].id))

    def _shown(self, instructions):
        self.scheduler.validate()
        return shown(self.plan, instructions)


PPO = """
    rollout = g(data)
    score   = r(rollout)
    old     = l(rollout)
    ref     = l(rollout)
    charge  = s(score, old, ref)
    learn   = u(charge, rollout)
"""


def test_independent_nodes_run_concurrently():
    named = NamedScheduler(PPO, room={})
    named.begin()
    named.done("data")
    assert set(named.done("rollout").split()) >= {"+score", "+old", "+ref"}


def test_model_stages_alternate_while_rewards_run():
    named = NamedScheduler(PPO)
    named.begin()
    named.done("data")
    assert named.done("rollout") == "-data +old +score"
    assert named.done("old") == "+ref"
    assert named.done("score") == ""
    assert named.done("ref") == "+charge"


def test_a_column_is_freed_after_its_last_reader():
    named = NamedScheduler(PPO, room={})
    assert named.begin() == "+data"
    assert named.done("data") == "+rollout"
    assert named.done("rollout") == "-data +old +ref +score"
    assert [named.done(name) for name in ("score", "old")] == ["", ""]
    assert named.done("ref") == "+charge"
    assert named.done("charge") == "-score -old -ref +learn"
    assert named.done("learn") == "-rollout -charge ."


def test_a_node_waits_for_its_predecessor_despite_a_free_slot():
    plan = plan_of(PPO)
    old, ref = (plan.graph.by_name[name].id for name in ("old", "ref"))
    named = NamedScheduler(PPO, room={})
    named.plan = replace(plan, turns={ref: old})
    named.scheduler = Scheduler(named.plan, {})
    assert named.plan.waits_for[ref] == plan.waits_for[ref] | {old}
    assert "old" in named.plan.names_before(ref)
    named.begin()
    named.done("data")
    assert set(named.done("rollout").split()) == {"-data", "+score", "+old"}
    assert named.done("old") == "+ref"


def test_the_longest_remaining_path_starts_first():
    named = NamedScheduler("""
        short = l(data)
        long  = l(data)
        more  = l(long)
        end   = u(short, more)
    """)
    named.begin()
    assert named.done("data") == "+long"
    assert named.done("long") == "+short"  # as long as `more`, and written before it


def test_ties_run_in_program_order():
    named = NamedScheduler("""
        first  = l(data)
        second = l(data)
        end    = u(first, second)
    """)
    named.begin()
    assert named.done("data") == "+first"


def test_nothing_starts_after_a_failure_and_all_columns_are_freed():
    named = NamedScheduler(PPO)
    named.begin()
    named.done("data")
    named.done("rollout")
    assert named.failed("old") == ""
    assert named.scheduler.running == {named.plan.graph.by_name["score"].id}
    assert named.done("score") == "-rollout -score !"


def test_a_second_failure_changes_nothing():
    named = NamedScheduler(PPO, room={})
    named.begin()
    named.done("data")
    named.done("rollout")
    named.failed("old")
    named.failed("score")
    assert named.failed("ref") == "-rollout !"


def test_a_failure_of_the_only_node_ends_at_once():
    named = NamedScheduler("end = u(data)")
    named.begin()
    named.done("data")
    assert named.failed("end") == "-data !"


def test_an_unneeded_node_does_not_run():
    plan = plan_of("""
        used   = l(data)
        unused = l(data)
        end    = u(used)
    """)
    assert [plan.graph.nodes[i].name for i in plan.live] == ["data", "used", "end"]
    assert str(plan.notes[0]) == "prune: 2 of 3 columns are read; dropped unused"


def test_an_update_starts_with_the_last_forward_of_its_role():
    plan = plan_of("""
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
def test_an_update_starts_without_forwards_of_other_roles(end):
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


def test_an_unread_column_is_not_kept():
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


def test_recorded_columns_are_kept_to_the_end():
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
def test_a_queue_respects_its_limit(limit):
    names = [f"s{i}" for i in range(5)]
    named = NamedScheduler(
        "\n".join([*(f"{name} = s(data)" for name in names), f"end = u({', '.join(names)})"]),
        room={"cpu": limit},
    )
    named.begin()
    assert named.done("data") == " ".join(f"+s{i}" for i in range(limit))


# -- any graph, in virtual time
# ----------------------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    """Draw up to 12 nodes of any kind on any earlier columns; the final update reads the last column."""
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
    """Run a plan in virtual time. Yield after each event the started, ended and stored items, and whether the
    plan is over.
    """
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
        readers_left = {c for c, readers in plan.readers.items() if readers - ended} | plan.keep_until_end
        assert over or stored <= readers_left, "a column is freed at its last reader"
    assert over == Finish(False)
    assert set(started) == ended == set(plan.live)
    assert not stored


@settings(deadline=None)
@given(plans(), ROOMS, DURATIONS, st.data())
def test_everything_is_freed_after_a_failure(plan, room, durations, data):
    fails = data.draw(st.sampled_from([i for i in plan.live if i]))
    started, ended, stored, over = list(simulated(plan, room, durations, fails))[-1]
    assert not {node for node in started if fails in plan.waits_for[node]}
    assert over == Finish(True)
    assert fails not in ended
    assert not stored
