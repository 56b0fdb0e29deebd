"""Passes: from a program to a plan. Each takes a plan, returns a plan and says what it did.

    prune   keep the columns that a later node or the run's records read; drop nodes that nothing needs
    lanes   which worker runs each node: in one process by its kind, on pools by pool and kind
    stream  cuts scoring into pieces, one for each chunk of the rows that are sampled, where the results are the same bits
    rank    priority of each node: the longest path that remains after it
    reuse   forwards whose graph the role's next update can go on from, if it takes all of their rows in its first step
"""

from __future__ import annotations

import graphlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlflow.graph.model import Column, Graph, Node, Op
from rlflow.placement import Placement, homes
from rlflow.residency import Course
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
class Streaming:
    """How sampled rows may be streamed: in how many ``chunks`` (1: not at all); ``by`` role whose generator gives rows as they end; and
    the roles whose scores and forwards are ``exact`` by row: the same bits whichever rows are computed beside it."""

    chunks: int = 1
    by: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Piece:
    """A node's work on one chunk, counted from 0, of the rows that the node ``source`` samples."""

    node: int
    source: int
    chunk: int


@dataclass(frozen=True)
class Plan:
    """What to run in one iteration. ``live`` are node ids, ``kept`` the columns worth holding, ``held_to_end`` those that the run's
    records read; ``bodies`` plans of repeats by node id; ``ahead`` by forward the rows of a step of the update that begins with it.

    ``chunks``: for a node whose rows are streamed the ids of its chunks but the last, which is there when the node is done; ``pieces``
    by id. A node in pieces joins what they gave. Ids of chunks and pieces follow those of the nodes.

    ``residency``: of pools with a limit what lies in memory when. ``turns``: for a node or piece the one that has its lane before it,
    where that is settled.
    """

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
    streaming: Streaming = Streaming()
    chunks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pieces: Mapping[int, Piece] = field(default_factory=dict)
    residency: tuple[Course, ...] = ()
    turns: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """What is scheduled: live nodes and pieces."""
        return (*self.live, *self.pieces)

    @cached_property
    def in_pieces(self) -> dict[int, list[int]]:
        """For each node that is cut its pieces."""
        found: dict[int, list[int]] = {}
        for i, piece in self.pieces.items():
            found.setdefault(piece.node, []).append(i)
        return found

    @cached_property
    def source_of(self) -> dict[int, int]:
        """For each chunk the node that samples it."""
        return {chunk: source for source, chunks in self.chunks.items() for chunk in chunks}

    def node(self, unit: int) -> Node:
        """The node itself, or that of a piece."""
        return self.graph.nodes[self.pieces[unit].node if unit in self.pieces else unit]

    def works_in(self, node: int) -> str:
        """The lane of the node's work: of one in pieces theirs."""
        return self.lane[self.in_pieces[node][0] if node in self.in_pieces else node]

    @cached_property
    def waits_for(self) -> dict[int, set[int]]:
        """For each live node the live nodes that must be done before it; for a piece those, but of its source just its chunk."""
        live = set(self.live)
        found = {i: {j for j in self.graph.order.predecessors(i) if j in live} for i in self.live}
        pieces = {i: found[piece.node] - {piece.source} | {self._chunk(piece)} for i, piece in self.pieces.items()}
        for i, piece in self.pieces.items():
            found[piece.node].add(i)
        found |= pieces
        for i, before in self.turns.items():
            found[i].add(before)
        return found

    def names_before(self, unit: int) -> tuple[str, ...]:
        """Names of what it waits for; of a chunk that of its source."""
        return tuple(dict.fromkeys(self.node(self.source_of.get(i, i)).name for i in self.waits_for[unit]))

    def _chunk(self, piece: Piece) -> int:
        ids = self.chunks[piece.source]
        return ids[piece.chunk] if piece.chunk < len(ids) else piece.source

    @cached_property
    def followers(self) -> dict[int, tuple[int, ...]]:
        """For each live node, piece and chunk those that wait for it."""
        found: dict[int, list[int]] = {i: [] for i in itertools.chain(self.units, *self.chunks.values())}
        for i, before in self.waits_for.items():
            for j in before:
                found[j].append(i)
        return {i: tuple(later) for i, later in found.items()}

    @cached_property
    def reads(self) -> dict[int, frozenset[Column]]:
        """For each live node the columns that it reads. One in pieces reads for them, since it ends after all."""
        return {i: frozenset(item.column for item in self.node(i).inputs if i not in self.pieces) for i in self.units}

    @cached_property
    def gives(self) -> dict[int, tuple[Column, ...]]:
        """For each live node its columns that are kept. What pieces give is not seen before it is joined."""
        return {i: tuple(Column(i, name) for name in self.keeps(self.node(i)) if i not in self.pieces) for i in self.units}

    def shared(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Seconds of nodes as those of all that is scheduled: of one in pieces each piece has an even share, and joining takes none."""
        own = {i: 0.0 if i in self.in_pieces else seconds[i] for i in self.live}
        return own | {i: seconds[piece.node] / len(self.in_pieces[piece.node]) for i, piece in self.pieces.items()}

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


def stream(plan: Plan) -> Plan:
    """Cut what scores rows by themselves into pieces that start before all rows are sampled: rewards and forwards, where a row's bits do
    not depend on the rows beside it and the work does not take turns with the sampling. A node that samples then gives chunks."""
    ids = itertools.count(len(plan.graph.nodes))
    chunks: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, Piece] = {}
    said: list[str] = []
    for source in (plan.graph.nodes[i] for i in plan.live if plan.graph.nodes[i].op is Op.GENERATE):
        left = {node.id: why for node in _scores(plan, source) if (why := _whole(plan, source, node))}
        cut = [node.id for node in _scores(plan, source) if node.id not in left]
        said.append(_streamed(plan, source, cut, left))
        if cut:
            chunks[source.id] = tuple(itertools.islice(ids, plan.streaming.chunks - 1))
            pieces |= {next(ids): Piece(node, source.id, chunk) for chunk in range(plan.streaming.chunks) for node in cut}
    what = "; ".join(said) if plan.streaming.chunks > 1 and said else "nothing is scored before all rows are sampled"
    lane = {**plan.lane, **{i: plan.lane[piece.node] for i, piece in pieces.items()}}
    lane |= {piece.node: "control" for piece in pieces.values()}
    return replace(plan, chunks=chunks, pieces=pieces, lane=lane, did=(*plan.did, Did("stream", what)))


def _scores(plan: Plan, source: Node) -> Iterator[Node]:
    """What could score the rows of a node that samples."""
    for node in (plan.graph.nodes[i] for i in plan.live):
        if node.axis == source.makes and node.op in (Op.REWARD, *FORWARDS):
            yield node


def _whole(plan: Plan, source: Node, node: Node) -> str:
    """Why a node scores all rows at once; nothing where it need not."""
    streaming, role = plan.streaming, node.role or ""
    models = any(use.name == role and (use.trained or not use.rewards) for use in plan.graph.roles)
    if streaming.chunks < 2:
        return "off"
    if source.role not in streaming.by:
        return f"the generator of {source.role} gives all rows at once"
    if models and plan.home.get(node.id) == plan.home.get(source.id):
        return f"takes turns with {source.name}"
    if role not in streaming.exact:
        return "rounds a row by the rows beside it"
    late = [plan.graph.nodes[j].name for j in _made_of(plan, source) if j in {item.column.node for item in node.inputs}]
    return f"reads {late[0]}, which waits for all rows" if late else ""


def _made_of(plan: Plan, source: Node) -> set[int]:
    """Nodes that wait for the one that samples."""
    found: set[int] = set()
    for i in plan.live:
        if plan.waits_for[i] & (found | {source.id}):
            found.add(i)
    return found


def _streamed(plan: Plan, source: Node, cut: list[int], left: Mapping[int, str]) -> str:
    """In one line."""
    names = ", ".join(plan.graph.nodes[i].name for i in cut)
    first = f"{source.name} gives {plan.streaming.chunks} chunks to {names}" if cut else f"{source.name} gives all rows at once"
    reasons: dict[str, list[str]] = {}
    for i, why in left.items():
        reasons.setdefault(why, []).append(plan.graph.nodes[i].name)
    return first + "".join(f"; not to {', '.join(nodes)} ({why})" for why, nodes in reasons.items())


def rank(plan: Plan, seconds: Mapping[int, float] | None = None, room: Mapping[str, int] | None = None) -> Plan:
    """Ready nodes start by what remains after them, longest first. ``seconds`` of each live node are by default what its kind usually
    takes beside others."""
    taken = plan.shared(seconds or {i: COST.get(plan.graph.nodes[i].op, 0.0) for i in plan.live})
    after = remaining(plan, taken, room or room_of(plan.placement))
    longest = max(after, key=lambda i: after[i] + taken[i])
    return replace(plan, priority=after, did=(*plan.did, Did("rank", f"the longest path starts at {plan.node(longest).name}")))


def remaining(plan: Plan, seconds: Mapping[int, float], room: Mapping[str, int]) -> dict[int, float]:
    """For each live node and piece the seconds that pass at least from its end to that of the iteration: the longest path through those
    that wait for it, which take turns where they share a lane. A node's own seconds do not count: of two that are ready for one place, the
    one with more to come must go first, however long it takes (Jackson 1955)."""
    after: dict[int, float] = {}
    for i in reversed(list(graphlib.TopologicalSorter(plan.waits_for).static_order())):
        sharing: dict[str, list[tuple[float, float]]] = {}
        for j in plan.followers.get(i, ()):
            sharing.setdefault(plan.lane.get(j, ""), []).append((after[j], seconds[j]))
        after[i] = max((_in_turn(nodes, room.get(lane, math.inf)) for lane, nodes in sharing.items()), default=0.0)
    return {i: after[i] for i in plan.units}


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
    if before[-1].id in plan.in_pieces:
        return replace(plan, did=(*plan.did, Did("reuse", f"{before[-1].name} is in pieces, so {first.name} begins anew")))
    rows = dict(first.settings).get("minibatch")
    ahead = {before[-1].id: float(str(rows)) if rows is not None else math.inf}
    upto = f" of at most {rows} rows" if rows is not None else ""
    return replace(plan, ahead=ahead, did=(*plan.did, Did("reuse", f"{first.name} begins with {before[-1].name}{upto}")))


PASSES: tuple[Callable[[Plan], Plan], ...] = (prune, lanes, stream, rank, reuse)


def plan(program: Program, placement: Placement | None = None, streaming: Streaming = Streaming()) -> Plan:
    """All passes over the program's graph, and over the bodies of its repeats; with a placement for its pools, else for one process."""
    return _planned(program, program.graph, placement, streaming, is_body=False)


def _planned(program: Program, graph: Graph, placement: Placement | None, streaming: Streaming, is_body: bool) -> Plan:
    held = frozenset(item.column for item in graph.results) if is_body else frozenset()
    made = Plan(program, graph, tuple(node.id for node in graph.nodes), held_to_end=held, placement=placement, streaming=streaming)
    for run_pass in PASSES:
        made = run_pass(made)
    bodies = {node.id: _planned(program, node.body, placement, streaming, is_body=True) for node in graph.nodes if node.body}
    return replace(made, bodies=bodies)
