"""Passes: from a program to a plan. Each takes a plan, returns a plan and says what it did.

    prune   keep the columns that a later node or the run's records read; drop nodes that nothing needs
    lanes   which worker runs each node: in one process by its kind, on pools by pool and kind
    rank    priority of each node: the longest path that remains after it
    reuse   forwards whose graph the role's next update can go on from, if it takes all of their rows in its first step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

from rlflow.graph.model import Column, Graph, Node, Op
from rlflow.placement import Placement, homes
from rlflow.trace.compile import Program

FORWARDS = (Op.LOGPROBS, Op.VALUES)
RECORDED = ("prompt", "answer", "completion", "finish", "scores", "tokens", "mask")
WATCHED = ("logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")  # recorded where something reads them anyway
COST = {Op.GENERATE: 10.0, Op.REPEAT: 20.0, Op.UPDATE: 8.0, Op.REWARD: 3.0, Op.LOGPROBS: 2.0, Op.VALUES: 2.0, Op.STAGE: 0.2}
LANES = {Op.GENERATE: "model", Op.LOGPROBS: "model", Op.VALUES: "model", Op.UPDATE: "model", Op.REWARD: "io", Op.REPEAT: "control"}
ROOM = {"model": 1, "cpu": 2, "io": 8}  # nodes that a lane runs at once: model stages of one process share its cores
POOL_ROOM = {"": 1, ".cpu": 2, ".io": 4}  # the same for a pool: its models' nodes, stages, rewards


@dataclass(frozen=True)
class Did:
    """What a pass did, in one line."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class Plan:
    """What to run in one iteration. ``live`` are node ids, ``kept`` the columns worth holding, ``held_to_end`` those that the run's
    records read; ``bodies`` plans of repeats by node id; ``ahead`` by forward the rows of a step of the update that begins with it."""

    program: Program
    graph: Graph
    live: tuple[int, ...]
    kept: frozenset[Column] = frozenset()
    held_to_end: frozenset[Column] = frozenset()
    priority: Mapping[int, float] = field(default_factory=dict)
    lane: Mapping[int, str] = field(default_factory=dict)
    ahead: Mapping[int, float] = field(default_factory=dict)
    bodies: Mapping[int, Plan] = field(default_factory=dict)
    did: tuple[Did, ...] = ()
    placement: Placement | None = None
    home: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def waits_for(self) -> dict[int, set[int]]:
        """For each live node the live nodes that must be done before it."""
        live = set(self.live)
        return {i: {j for j in self.graph.order.predecessors(i) if j in live} for i in self.live}

    @cached_property
    def followers(self) -> dict[int, tuple[int, ...]]:
        """For each live node the live nodes that wait for it."""
        found: dict[int, list[int]] = {i: [] for i in self.live}
        for i, before in self.waits_for.items():
            for j in before:
                found[j].append(i)
        return {i: tuple(later) for i, later in found.items()}

    @cached_property
    def reads(self) -> dict[int, frozenset[Column]]:
        """For each live node the columns that it reads."""
        return {i: frozenset(item.column for item in self.graph.nodes[i].inputs) for i in self.live}

    @cached_property
    def gives(self) -> dict[int, tuple[Column, ...]]:
        """For each live node its columns that are kept."""
        return {i: tuple(Column(i, name) for name in self.keeps(self.graph.nodes[i])) for i in self.live}

    @cached_property
    def readers(self) -> dict[Column, set[int]]:
        """For each kept column the live nodes that read it."""
        found: dict[Column, set[int]] = {column: set() for column in self.kept}
        for i, columns in self.reads.items():
            for column in columns:
                found.setdefault(column, set()).add(i)
        return found

    def keeps(self, node: Node) -> tuple[str, ...]:
        """Names of the node's outputs that are kept."""
        return tuple(output.name for output in node.outputs if Column(node.id, output.name) in self.kept)

    def __str__(self) -> str:
        return "\n".join(str(did) for did in self.did)


def prune(plan: Plan) -> Plan:
    """Dead columns go, and forwards of models that nobody reads. Samples and state are readers, and so are metrics: a stage of the
    author's own may end with some, which only running it tells."""
    graph = plan.graph
    results = {item.column for item in graph.results} if plan.held_to_end else set()
    recorded = frozenset(_last(graph, RECORDED) | results | {slot.final for slot in graph.state})
    live: set[int] = set()
    needed = set(recorded)
    for node in reversed(graph.nodes):
        outputs = {Column(node.id, output.name) for output in node.outputs}
        if outputs & needed or node.op not in FORWARDS:
            live.add(node.id)
            needed |= {item.column for item in node.inputs}
    total = sum(len(node.outputs) for node in graph.nodes)
    kept = frozenset(c for c in needed if any(o.name == c.name for o in graph.nodes[c.node].outputs))
    dead = [node.name for node in graph.nodes if node.id not in live]
    what = f"{len(kept)} of {total} columns are read" + (f"; dropped {', '.join(dead)}" if dead else "")
    order = tuple(sorted(live))
    recorded |= _last(graph, WATCHED) & kept
    return replace(plan, live=order, kept=kept, held_to_end=recorded, did=(*plan.did, Did("prune", what)))


def _last(graph: Graph, names: tuple[str, ...]) -> set[Column]:
    """The last column of each name, which samples and default metrics show."""
    last: dict[str, Column] = {}
    for node in graph.nodes:
        last |= {output.name: Column(node.id, output.name) for output in node.outputs if output.name in names}
    return set(last.values())


def lanes(plan: Plan) -> Plan:
    """Model stages run one at a time on a pool; stages, rewards and transfers beside them."""
    home = homes(plan.graph, plan.placement) if plan.placement else {}
    lane = {i: _lane(plan.graph.nodes[i], home.get(i)) for i in plan.live}
    counts = {name: sum(1 for used in lane.values() if used == name) for name in sorted(set(lane.values()))}
    what = ", ".join(f"{name} {count}" for name, count in counts.items())
    return replace(plan, lane=lane, home=home, did=(*plan.did, Did("lanes", what)))


def _lane(node: Node, pool: str | None) -> str:
    kind = LANES.get(node.op, "control")
    if node.op is Op.STAGE:
        kind = "model" if node.role else "cpu"
    if pool is None or kind == "control":
        return kind
    return pool if kind == "model" else f"{pool}.{kind}"


def room_of(placement: Placement | None) -> dict[str, int]:
    """How many nodes each lane runs at once."""
    if placement is None:
        return dict(ROOM)
    return {f"{name}{kind}": places for name in placement.pools for kind, places in POOL_ROOM.items()}


def rank(plan: Plan, seconds: Mapping[int, float] | None = None, room: Mapping[str, int] | None = None) -> Plan:
    """Ready nodes start by what remains after them, longest first. ``seconds`` of each live node are by default what its kind usually
    takes beside others."""
    seconds = seconds or {i: COST.get(plan.graph.nodes[i].op, 0.0) for i in plan.live}
    after = remaining(plan, seconds, room or room_of(plan.placement))
    longest = max(after, key=lambda i: after[i] + seconds[i])
    return replace(plan, priority=after, did=(*plan.did, Did("rank", f"the longest path starts at {plan.graph.nodes[longest].name}")))


def remaining(plan: Plan, seconds: Mapping[int, float], room: Mapping[str, int]) -> dict[int, float]:
    """For each live node the seconds that pass at least from its end to that of the iteration: the longest path through those that
    wait for it, which take turns where they share a lane. A node's own seconds do not count: of two that are ready for one place, the
    one with more to come must go first, however long it takes (Jackson 1955)."""
    after: dict[int, float] = {}
    for i in reversed(list(nx.topological_sort(plan.graph.order))):
        sharing: dict[str, list[tuple[float, float]]] = {}
        for j in plan.followers.get(i, ()):
            sharing.setdefault(plan.lane.get(j, ""), []).append((after[j], seconds[j]))
        after[i] = max((_in_turn(nodes, room.get(lane, math.inf)) for lane, nodes in sharing.items()), default=0.0)
    return {i: after[i] for i in plan.live}


def _in_turn(nodes: list[tuple[float, float]], room: float) -> float:
    """The least time until all of some nodes, each with the seconds that remain after it and its own, and what follows them are done."""
    longest = taken = 0.0
    for after, own in sorted(nodes, reverse=True):
        taken += own / room
        longest = max(longest, max(own, taken) + after)
    return longest


def reuse(plan: Plan) -> Plan:
    """The last forward of a role before its first update, over the same rows. Not where another update comes between: memory would
    hold the graphs of both."""
    nodes = [plan.graph.nodes[i] for i in plan.live]
    first = next((node for node in nodes if node.writes), None)
    before = [node for node in nodes if first and node.op in FORWARDS and node.role == first.role and node.id < first.id]
    if first is None or first.op is not Op.UPDATE or first.rows != "row" or not before or before[-1].axis != first.axis:
        return replace(plan, did=(*plan.did, Did("reuse", "no update begins with a forward that was made before")))
    rows = dict(first.settings).get("minibatch")
    ahead = {before[-1].id: float(str(rows)) if rows is not None else math.inf}
    upto = f" of at most {rows} rows" if rows is not None else ""
    return replace(plan, ahead=ahead, did=(*plan.did, Did("reuse", f"{first.name} begins with {before[-1].name}{upto}")))


PASSES: tuple[Callable[[Plan], Plan], ...] = (prune, lanes, rank, reuse)


def plan(program: Program, placement: Placement | None = None) -> Plan:
    """All passes over the program's graph, and over the bodies of its repeats; with a placement for its pools, else for one process."""
    return _planned(program, program.graph, placement, is_body=False)


def _planned(program: Program, graph: Graph, placement: Placement | None, is_body: bool) -> Plan:
    held = frozenset(item.column for item in graph.results) if is_body else frozenset()
    made = Plan(program, graph, tuple(node.id for node in graph.nodes), held_to_end=held, placement=placement)
    for run_pass in PASSES:
        made = run_pass(made)
    bodies = {node.id: _planned(program, node.body, placement, is_body=True) for node in graph.nodes if node.body}
    return replace(made, bodies=bodies)
