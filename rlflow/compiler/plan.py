"""The plan of one iteration: which nodes run, and in which order they must.

Passes make a plan from a program, which is a traced flow.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlflow.author.schedule import CallSchedule
from rlflow.compiler.graph.due import DueSet, Idle, idle_in
from rlflow.compiler.graph.model import Column, Graph, Node, Op
from rlflow.compiler.placement import Placement
from rlflow.compiler.residency_schedule import MemorySchedule
from rlflow.compiler.trace.compile import Program

FORWARDS = (Op.LOGPROBS, Op.VALUES)


@dataclass(frozen=True)
class PassNote:
    """The name of a pass, and a line on what it changed in the plan."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class ScoredColumns:
    """The scores of the rows that an update learns from, and the score-based columns that it reads."""

    # reward role → its scores, if several roles score these rows
    rewards: Mapping[str, Column] = field(default_factory=dict)
    learned: tuple[Column, ...] = ()  # score-based columns of these rows that the update reads

    def __iter__(self) -> Iterator[Column]:
        yield from (*self.rewards.values(), *self.learned)


@dataclass(frozen=True)
class Streaming:
    """Which rows can be scored in chunks while others are still being sampled, and the number of chunks."""

    chunks: int = 1  # number of chunks of the rows; 1: no streaming
    by: frozenset[str] = frozenset()  # roles whose generator returns each row when it ends
    # roles whose scores and forwards of a row are bit-equal, whatever other rows the batch has
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Piece:
    """A node's work on one chunk of sampled rows."""

    node: int
    source: int  # the node that samples the rows
    chunk: int  # counted from 0


@dataclass(frozen=True)
class Plan:
    """The plan of one iteration: where and in which order its nodes run, and which columns are kept.

    Its units are nodes and pieces of nodes. A node that is cut into pieces joins their results itself. Ids of
    chunks and pieces are larger than those of all nodes.
    """

    program: Program
    graph: Graph
    live: tuple[int, ...]  # ids of the nodes that run
    columns: frozenset[Column] = frozenset()  # columns that are stored
    keep_until_end: frozenset[Column] = frozenset()  # columns that the run's records read
    # unit → priority; of the units that may start, the highest starts first
    priority: Mapping[int, float] = field(default_factory=dict)
    lane: Mapping[int, str] = field(default_factory=dict)  # unit → its executor queue
    # forward whose autograd graph the next update reuses → the maximum number of rows in one step of that
    # update
    ahead: Mapping[int, float] = field(default_factory=dict)
    # forward or update → number of rows that share a prompt, if its trainer runs the prompt through the model
    # once
    prompt_rows: Mapping[int, int] = field(default_factory=dict)
    bodies: Mapping[int, Plan] = field(default_factory=dict)  # repeat → the plan of its body
    notes: tuple[PassNote, ...] = ()  # what the passes changed
    placement: Placement | None = None  # placement of roles on pools; None in one process
    home: Mapping[int, str] = field(default_factory=dict)  # node → the pool that runs it
    streaming: Streaming = Streaming()
    # sampling node → the ids of its chunks; the last chunk has no id, because it comes when the node ends
    chunks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pieces: Mapping[int, Piece] = field(default_factory=dict)  # id → piece
    residency: tuple[MemorySchedule, ...] = ()  # the memory schedules of pools with a limit
    # unit → the unit that must run directly before it in its queue, if the order is fixed
    turns: Mapping[int, int] = field(default_factory=dict)
    evaluation: Plan | None = None  # plan of the flow's own evaluation, if it has one
    # name → the column that samples and health metrics show
    records: Mapping[str, Column] = field(default_factory=dict)
    # role → the same for the role's own rows, if several trained roles sample
    policies: Mapping[str, Mapping[str, Column]] = field(default_factory=dict)
    # role of ``policies`` → the scores that its first update learns from; without ``policies``, one entry
    # under ""
    judged: Mapping[str, ScoredColumns] = field(default_factory=dict)
    # of a flow whose calls aren't all due in every iteration: their schedules, all sets of calls that are due
    # together, and the plan of each set in which some are idle. The plan itself is that of all calls
    schedules: Mapping[str, CallSchedule] = field(default_factory=dict)
    due_sets: tuple[DueSet, ...] = ()
    variants: Mapping[Idle, Plan] = field(default_factory=dict)
    idle: Mapping[int, Node] = field(default_factory=dict)  # nodes that aren't due, as they are when due

    def at(self, iteration: int) -> Plan:
        """Return the plan of an iteration, which is this one if all calls are due in it."""
        idle = idle_in(self.schedules, iteration)
        return self.variants[idle] if idle else self

    def each(self) -> Iterator[tuple[DueSet, Plan]]:
        """Yield each set of calls that are due together, with its plan."""
        for due_set in self.due_sets:
            yield due_set, self.variants.get(due_set.idle, self)

    def _repr_html_(self) -> str:
        """Return a drawing for notebooks, with each node's pool or queue and the passes' notes."""
        from rlflow.compiler.graph.draw import html

        where = {i: self.home.get(i) or self.lane.get(i, "") for i in self.live}
        return html(self.graph, where, [str(note) for note in self.notes])

    def before(self, end: int) -> Plan:
        """Return a plan of just the nodes before the node ``end`` in program order.

        It doesn't set state or return results.
        """
        live = tuple(i for i in self.live if i < end)
        pieces = {i: piece for i, piece in self.pieces.items() if piece.node < end}
        return replace(
            self,
            graph=replace(self.graph, nodes=self.graph.nodes[:end], state=(), results=()),
            live=live,
            pieces=pieces,
            columns=frozenset(column for column in self.columns if column.node < end),
            keep_until_end=frozenset(column for column in self.keep_until_end if column.node < end),
            chunks={i: chunks for i, chunks in self.chunks.items() if i < end},
            turns=_turns_of(self.turns, {*live, *pieces}),
            variants={idle: plan.before(end) for idle, plan in self.variants.items()},
        )

    def with_all(self) -> Plan:
        """Return the plan of iterations in which all calls are due, whatever their schedules."""
        return replace(self, schedules={}, due_sets=(), variants={})

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The ids of all units that the executor schedules: live nodes and pieces."""
        return (*self.live, *self.pieces)

    @cached_property
    def in_pieces(self) -> dict[int, list[int]]:
        """For each node that is cut into pieces, the ids of these, by node id."""
        pieces: dict[int, list[int]] = {}
        for i, piece in self.pieces.items():
            pieces.setdefault(piece.node, []).append(i)
        return pieces

    @cached_property
    def source_of(self) -> dict[int, int]:
        """For each chunk, the id of the node that samples it."""
        return {chunk: source for source, chunks in self.chunks.items() for chunk in chunks}

    def node(self, unit: int) -> Node:
        """Return the node that a unit is, or is a piece of."""
        return self.graph.nodes[self.pieces[unit].node if unit in self.pieces else unit]

    @cached_property
    def within(self) -> dict[str, str]:
        """For each node in the body of a `repeat`, the name of the `repeat`, by node name."""
        names: dict[str, str] = {}
        for i, body in self.bodies.items():
            names |= (
                dict.fromkeys((body.graph.nodes[j].name for j in body.live), self.graph.nodes[i].name)
                | body.within
            )
        return names

    def works_in(self, node: int) -> str:
        """Return the queue for a node's work, which is that of its pieces if it has any."""
        return self.lane[self.in_pieces[node][0] if node in self.in_pieces else node]

    @cached_property
    def waits_for(self) -> dict[int, set[int]]:
        """For each unit, the units that must end before it starts.

        A piece waits for the same units as its node, but instead of the whole sampling node, only for its own
        chunk.
        """
        live = set(self.live)
        predecessors = {i: {j for j in self.graph.order.predecessors(i) if j in live} for i in self.live}
        pieces = {
            i: predecessors[piece.node] - {piece.source} | {self._chunk(piece)}
            for i, piece in self.pieces.items()
        }
        for i, piece in self.pieces.items():
            predecessors[piece.node].add(i)
        predecessors |= pieces
        for i, before in self.turns.items():
            predecessors[i].add(before)
        return predecessors

    def names_before(self, unit: int) -> tuple[str, ...]:
        """Return the names of the nodes that a unit waits for. A chunk counts as the node that samples it."""
        return tuple(dict.fromkeys(self.node(self.source_of.get(i, i)).name for i in self.waits_for[unit]))

    def _chunk(self, piece: Piece) -> int:
        ids = self.chunks[piece.source]
        return ids[piece.chunk] if piece.chunk < len(ids) else piece.source

    @cached_property
    def followers(self) -> dict[int, tuple[int, ...]]:
        """For each unit or chunk, the units that wait for it."""
        after: dict[int, list[int]] = {i: [] for i in itertools.chain(self.units, *self.chunks.values())}
        for i, before in self.waits_for.items():
            for j in before:
                after[j].append(i)
        return {i: tuple(later) for i, later in after.items()}

    @cached_property
    def reads(self) -> dict[int, frozenset[Column]]:
        """For each unit, the columns that it reads.

        What a piece reads counts for its node, because the node ends after its last piece.
        """
        return {
            i: frozenset(
                item.column
                for item in self.node(i).inputs
                if i not in self.pieces and item.column in self.columns
            )
            for i in self.units
        }

    @cached_property
    def gives(self) -> dict[int, tuple[Column, ...]]:
        """For each unit, the columns it returns that are kept.

        A node returns the columns of its pieces, which it joins.
        """
        return {
            i: tuple(Column(i, name) for name in self.keeps(self.node(i)) if i not in self.pieces)
            for i in self.units
        }

    def shared(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Convert each node's seconds into seconds per unit.

        The pieces of a node get equal shares of its duration. Joining them takes no time.
        """
        own = {i: 0.0 if i in self.in_pieces else seconds[i] for i in self.live}
        return own | {
            i: seconds[piece.node] / len(self.in_pieces[piece.node]) for i, piece in self.pieces.items()
        }

    @cached_property
    def readers(self) -> dict[Column, set[int]]:
        """For each kept column, the ids of the live nodes that read it."""
        nodes: dict[Column, set[int]] = {column: set() for column in self.columns}
        for i, columns in self.reads.items():
            for column in columns:
                nodes.setdefault(column, set()).add(i)
        return nodes

    def keeps(self, node: Node) -> tuple[str, ...]:
        """Return the names of those outputs of a node that are kept."""
        return tuple(output.name for output in node.outputs if Column(node.id, output.name) in self.columns)

    def __str__(self) -> str:
        return "\n".join(str(note) for note in self.notes)


def _turns_of(turns: Mapping[int, int], units: Collection[int]) -> dict[int, int]:
    """Restrict the fixed order ``turns`` (unit → the unit before it) to these units."""
    own: dict[int, int] = {}
    for unit in units:
        before = turns.get(unit)
        while before is not None and before not in units:
            before = turns.get(before)
        if before is not None:
            own[unit] = before
    return own
