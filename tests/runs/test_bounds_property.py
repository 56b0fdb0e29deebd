"""The printed bound of any run: a chain of nodes from one of its iterations, each waiting for the one before
it. No time counts twice."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.passes.prune import prune
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.plan import Plan
from rlflow.compiler.simulate import simulate
from rlflow.compiler.spans import Span
from rlflow.runs.bounds import RunTotals
from rlflow.runs.final import bounds_text

HOLDER = "outer2"  # the node that runs the body, if there is one
ROOM = {"a": 1, "b": 2, "c": 3}


@st.composite
def plans(draw, name, queues="abc"):
    """Draw up to 6 nodes, each waiting for some earlier ones; nodes of queue a run one at a time."""
    count = draw(st.integers(2, 6))
    lane = {number: draw(st.sampled_from(queues)) for number in range(1, count + 1)}
    nodes = [Node(0, Op.DATA, "prompts", 0, outputs=(Output("x", None, "x"),))]
    for number in lane:
        before = draw(st.sets(st.integers(0, number - 1), max_size=2)) or {0}
        inputs = tuple(Input(f"x{i}", Column(i, "x")) for i in sorted(before))
        nodes.append(Node(number, Op.STAGE, f"{name}{number}", 0, inputs, (Output("x", None, "x"),)))
    plan = prune(Plan(None, Graph(name, tuple(nodes), (RowAxis(),)), tuple(range(count + 1))))
    in_a = [number for number, of in lane.items() if of == "a"]
    turns = {later: first for first, later in pairwise(in_a)} if draw(st.booleans()) else {}
    return rank(
        replace(plan, lane={0: "control"} | lane, turns=turns), dict.fromkeys(range(count + 1), 1.0), ROOM
    )


def draw_spans(plan, draw, after=0.0):
    """Draw the spans of the plan in virtual time; each node takes a whole number of seconds, possibly 0."""
    seconds = {number: float(draw(st.integers(0, 5))) for number in plan.live}
    return [
        replace(span, start=span.start + after, end=span.end + after)
        for span in simulate(plan, seconds, ROOM).spans
    ]


@dataclass
class Case:
    """The spans of each iteration, the pairs of nodes that may follow one another on a chain, and the nesting
    of nodes."""

    iterations: list[list[Span]]
    edges: set[tuple[str, str]]
    within: dict[str, str]


def edges(plan, queues):
    """Return what a node can have waited for: earlier nodes of the plan, and other nodes of a limited
    queue."""
    names = {unit: plan.node(unit).name for unit in plan.units}
    own = {(names[before], names[unit]) for unit, waits in plan.waits_for.items() for before in waits}
    return own | {
        (names[i], names[j])
        for i in plan.units
        for j in plan.units
        if i != j and plan.lane[i] == plan.lane[j] in queues
    }


@st.composite
def cases(draw):
    outer = draw(plans("outer"))
    if not draw(st.booleans()) or len(outer.live) < 3:
        return Case([draw_spans(outer, draw) for _ in range(draw(st.integers(1, 4)))], edges(outer, ROOM), {})
    body, outer = draw(plans("inner", "bc")), replace(outer, lane=outer.lane | {2: "control"}, turns={})
    entries = {body.node(i).name for i, before in body.waits_for.items() if before <= {0}}
    holder = outer.graph.nodes[2].id
    into = {(outer.node(before).name, name) for before in outer.waits_for[holder] for name in entries}
    out = {(body.node(i).name, HOLDER) for i in body.live} | {(HOLDER, name) for name in entries}
    return Case(
        [repeated(outer, body, draw) for _ in range(draw(st.integers(1, 4)))],
        edges(outer, ROOM)
        | edges(body, ROOM)
        | into
        | out
        | {(body.node(i).name, name) for i in body.live for name in entries},
        dict.fromkeys((body.node(i).name for i in body.live), HOLDER),
    )


def repeated(outer, body, draw):
    """Draw an iteration in which one node runs the body several times, with and without a pause between."""
    inner, now = [], float(draw(st.integers(0, 2)))
    for _ in range(draw(st.integers(1, 3))):
        inner += draw_spans(body, draw, now)
        now = max([now, *(span.end for span in inner)]) + draw(st.integers(0, 1))
    seconds = {number: now if number == 2 else float(draw(st.integers(0, 5))) for number in outer.live}
    spans = list(simulate(outer, seconds, ROOM).spans)
    began = next(span.start for span in spans if span.node == HOLDER)
    return spans + [
        replace(span, lane=f"{span.lane}'", start=span.start + began, end=span.end + began) for span in inner
    ]


@settings(deadline=None, max_examples=80)
@given(cases())
def test_the_chain_comes_from_one_iteration_and_counts_no_time_twice(case):
    totals = RunTotals(ROOM | {f"{lane}'": places for lane, places in ROOM.items()}, within=case.within)
    for spans in case.iterations:
        totals.add(spans, 0.0, max((span.end for span in spans), default=0.0) + 0.5)
    found = totals.bounds
    chain = [*found.critical]
    assert set(pairwise(chain)) <= case.edges
    assert any(all(follows(spans, a, b) for a, b in pairwise(chain)) for spans in case.iterations)
    assert 1 <= found.alike <= len(case.iterations)
    assert sum(found.critical.values()) <= found.seconds * len(case.iterations) / found.alike + 1e-9
    assert sum(share.critical for share in totals) <= totals.seconds + 1e-9
    assert sum(share.part for share in totals) <= totals.seconds + 1e-9
    assert all(share.part <= share.seconds + 1e-9 for share in totals)
    own = sum(busy_seconds(spans, {HOLDER}) - busy_seconds(spans, case.within) for spans in case.iterations)
    assert not case.within or abs(totals.shares[HOLDER].seconds - own) < 1e-9
    if case.within and HOLDER in chain and all(busy_seconds(spans, case.within) for spans in case.iterations):
        assert set(case.within) & set(chain)
    shown = re.findall(
        r"(\w+) \d+\.\d{3} s|…", bounds_text(totals).splitlines()[-2].partition(": ")[2].partition(";")[0]
    )
    assert [name for name in shown if name] == [name for name in chain if name in shown]


def busy_seconds(spans, names):
    """Return the seconds during which nodes of these names ran; all times are whole and below 200."""
    return sum(
        any(span.start <= second < span.end for span in spans if span.node in names) for second in range(200)
    )


def follows(spans, first, later):
    """Return True if one node had ended when the other began, or contains the other."""
    return any(
        a.end <= b.start + 1e-9 or HOLDER in (first, later)
        for a in spans
        if a.node == first
        for b in spans
        if b.node == later
    )


@settings(deadline=None, max_examples=50)
@given(cases())
def test_with_one_queue_the_path_takes_all_the_time(case):
    spans = case.iterations[0]
    totals = RunTotals(ROOM | {f"{lane}'": places for lane, places in ROOM.items()}, within=case.within)
    end = max(span.end for span in spans)
    totals.add(spans, 0.0, end)
    # in virtual time, a node of the path runs at each moment
    assert abs(sum(share.critical for share in totals) - end) < 1e-9
