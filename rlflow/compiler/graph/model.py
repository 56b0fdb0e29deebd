"""The graph of one iteration, as frozen data, and the order of its nodes.

Edges are columns: an input refers to the node that computes its column. Other constraints on the order aren't
stored but derived. A node that reads a model's weights runs after the writes that precede it in the program,
and before those that follow it. Writes of the same weights stay in program order, and so do stages with side
effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import networkx as nx

from rlflow.author.columns import PART, Kind
from rlflow.author.memory import Stored
from rlflow.author.node_options import AnyOptions, FollowOptions, NodeOptions, Pairs
from rlflow.author.schedule import ALWAYS, CallSchedule
from rlflow.errors import Place

Own = TypeVar("Own", bound=NodeOptions)


class Op(StrEnum):
    """The kinds of nodes. DATA and STATE nodes provide columns, IDLE nodes do nothing, all others run a call."""

    DATA = "data"
    STATE = "state"
    STAGE = "stage"
    GENERATE = "generate"
    LOGPROBS = "logprobs"
    VALUES = "values"
    REWARD = "reward"
    UPDATE = "update"
    REPEAT = "repeat"
    ASK = "ask"
    ENCODE = "encode"
    CHOOSE = "choose"
    CONCAT = "concat"
    READ = "read"  # of a table
    WRITE = "write"
    FOLLOW = "follow"  # a role's weights move towards those of another
    IDLE = "idle"  # not due in this iteration; see ``rlflow.compiler.graph.due``
    DRAW = "draw"  # of a buffer
    PUT = "put"


CHANGING = (Op.UPDATE, Op.FOLLOW)  # nodes that change the weights of their role


@dataclass(frozen=True)
class Column:
    """A reference to a column by its name and the node that computes it."""

    node: int
    name: str


SETTING = "setting."  # prefix of input parameters that are settings of the call
# the input that says whether an update starts with a fresh optimizer
FRESH_OPTIMIZER = f"{SETTING}fresh_optimizer"


@dataclass(frozen=True)
class Input:
    """An input of a node: a parameter and the column that it reads.

    For a setting that is a scalar column, the parameter is SETTING followed by the setting's name.
    """

    parameter: str
    column: Column


@dataclass(frozen=True)
class Output:
    """A column that a node returns."""

    name: str
    kind: Kind | None
    source: str  # the column's name in the function or method


@dataclass(frozen=True)
class RowAxis:
    """An axis of rows in a graph, and how they were made from other rows."""

    parent: int | None = None  # the axis that the rows were made from
    # rows sampled from each row, or rows kept of each chosen group; 0: unknown before a run
    samples: int = 0
    grouped: bool = False
    # how the rows were made: sampled, asked (follow-up prompts), cut (follow-up prompts at single tokens),
    # encoded (with responses made from text), chosen, joined, drawn (from a buffer)
    step: str = "sampled"
    parts: tuple[int, ...] = ()  # of joined rows: the axes of the parts, in order


@dataclass(frozen=True)
class Node:
    """One call of a flow, as a node of the graph."""

    id: int
    op: Op
    name: str
    axis: int  # axis of the rows of its inputs
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    settings: AnyOptions = NodeOptions()
    role: str | None = None
    dispatch: str = "DP_COMPUTE"  # how its rows are split over the ranks of a pool
    rows: str = "row"  # "group" if a call must not separate the rows of a group
    makes: int | None = None  # the axis of its outputs, if it differs
    call: int = 0  # its number in program order; random numbers are derived from it
    digest: str = ""  # digest of the function's source
    timeout: float = 300.0  # seconds
    pure: bool = True  # False: the call has side effects
    memory: str | None = None  # what the call reads or writes of the things that the flow keeps
    place: Place | None = None  # place of the call in the user's file; does not change the node's identity
    definition: Place | None = None  # place of the function; does not change the node's identity
    body: Graph | None = None  # body of a repeat
    schedule: CallSchedule = ALWAYS  # the iterations in which it is due

    @property
    def shown(self) -> Pairs:
        """The settings as pairs of name and value, with the first iteration of an update."""
        pairs = self.settings.shown
        return (*pairs[:3], ("after", self.schedule.after), *pairs[3:]) if self.op is Op.UPDATE else pairs

    @property
    def rows_axis(self) -> int:
        """The row axis of the node's outputs."""
        return self.axis if self.makes is None else self.makes

    @property
    def writes(self) -> frozenset[str]:
        """The roles whose weights this node can change."""
        own = (
            {self.role}
            if self.role and (self.op in CHANGING or (self.op is Op.STAGE and not self.pure))
            else set()
        )
        return frozenset(
            own | {role for node in (self.body.nodes if self.body else ()) for role in node.writes}
        )

    @property
    def reads(self) -> frozenset[str]:
        """The roles whose weights this node reads."""
        own = {self.role} if self.role else set()
        own |= {self.settings.follows} if isinstance(self.settings, FollowOptions) else set()
        return frozenset(
            own | {role for node in (self.body.nodes if self.body else ()) for role in node.reads}
        )

    @property
    def memories(self) -> frozenset[str]:
        """The names of what this node, or its body, reads or writes of the things that the flow keeps."""
        own = {self.memory} if self.memory else set()
        return frozenset(
            own | {name for node in (self.body.nodes if self.body else ()) for name in node.memories}
        )

    @property
    def impure_stage(self) -> Node | None:
        """The first stage with side effects, in this node or its body, or None."""
        if self.op is Op.STAGE and not self.pure:
            return self
        return next(
            (stage for node in (self.body.nodes if self.body else ()) if (stage := node.impure_stage)), None
        )

    def options(self, kind: type[Own]) -> Own:
        """Return the node's settings, which must be of the type ``kind``."""
        assert isinstance(self.settings, kind)
        return self.settings

    def output(self, name: str) -> Output:
        """Return the output with this name. Raises StopIteration if there is none."""
        return next(output for output in self.outputs if output.name == name)


# sides of a role: the trainer learns and computes, the generator samples
SIDES = ("trainer", "generator")


@dataclass(frozen=True)
class RoleUse:
    """How a flow uses a role."""

    name: str
    trained: bool = False
    head: str = "logprobs"  # the model's output: logprobs, values or scores
    generates: bool = False  # True if it samples
    rewards: bool = False  # True if it is called as a reward
    follows: str | None = None  # the role that its weights follow, if any

    @property
    def own_model(self) -> bool:
        """True if the role needs a model of its own, rather than the run's rewards."""
        return self.trained or self.follows is not None or not self.rewards


@dataclass(frozen=True)
class StateSlot:
    """A scalar that a flow carries over from one iteration to the next.

    It has an initial value, and a column that holds its value at the end of an iteration.
    """

    name: str
    initial: float
    final: Column


@dataclass(frozen=True)
class MemorySlot:
    """Something that a flow keeps from one iteration to the next, by its name."""

    name: str
    spec: Stored


@dataclass(frozen=True)
class Graph:
    """The graph of one iteration of an algorithm with given settings."""

    name: str
    nodes: tuple[Node, ...]
    axes: tuple[RowAxis, ...]
    hp: Pairs = ()
    roles: tuple[RoleUse, ...] = ()
    state: tuple[StateSlot, ...] = ()
    results: tuple[Input, ...] = ()  # the columns that the flow, or the body of a repeat, returns
    rows: int = 0  # the axis of the results
    # the flow's own evaluation on held-out prompts, if it has one; its first node gives the prompts
    evaluation: Graph | None = None
    memory: tuple[MemorySlot, ...] = ()  # what the flow keeps across iterations

    def __str__(self) -> str:
        from rlflow.compiler.graph.draw import text

        return text(self)

    def _repr_html_(self) -> str:
        """Return a drawing for notebooks."""
        from rlflow.compiler.graph.draw import html

        return html(self)

    def as_fields(self) -> dict[str, Any]:
        """Return the graph as plain values, with settings as they are shown.

        Without memory, nothing is said of it.
        """
        fields = asdict(self)
        for use in fields["roles"]:
            if use["follows"] is None:
                del use["follows"]
        if not self.memory:
            del fields["memory"]
        for node, own in zip(self.nodes, fields["nodes"], strict=True):
            own |= {"settings": node.shown, "body": node.body and node.body.as_fields()}
            if node.memory is None:
                del own["memory"]
        return fields | {"evaluation": self.evaluation and self.evaluation.as_fields()}

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Each node by its name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def changed_roles(self) -> tuple[str, ...]:
        """The roles whose weights an iteration can change.

        They are trained by an update, follow a trained role, or are passed to a stage with side effects.
        """
        written = {role for node in self.nodes for role in node.writes}
        return tuple(use.name for use in self.roles if use.name in written)

    @cached_property
    def order(self) -> nx.DiGraph:
        """The order of the nodes: a directed graph of node ids, with an edge per reason to wait.

        Reasons are ``columns`` that a node reads, ``weights`` of a role, and ``effects``, which keep stages
        with side effects in program order, reads of memory before its write, and a node that may skip the
        iteration before later changes of weights. A node also waits for whatever makes its rows, even if it
        reads none of their columns.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from(node.id for node in self.nodes)
        for node in self.nodes:
            for item in node.inputs:
                _edge(graph, item.column.node, node.id, "columns", item.parameter)
            read = {self.nodes[item.column.node].rows_axis for item in node.inputs}
            for maker in [
                self.makers[axis] for axis in self.works_on(node) if axis in self.makers and axis not in read
            ]:
                if maker != node.id:
                    _edge(graph, maker, node.id, "columns", "rows")
        for before, after, role in weight_order(self.nodes):
            _edge(graph, before, after, "weights", role)
        for before, after in pairwise(node.id for node in self.nodes if node.impure_stage):
            _edge(graph, before, after, "effects", "side effects")
        for before, after, memory in memory_order(self.nodes):
            _edge(graph, before, after, "effects", f"memory '{memory}'")
        for before, after in skip_order(self.nodes):
            _edge(graph, before, after, "effects", "may skip the iteration")
        return graph

    @cached_property
    def makers(self) -> dict[int, int]:
        """For each axis, the id of the node that makes its rows."""
        return {
            node.rows_axis: node.id
            for node in reversed(self.nodes)
            if node.makes is not None or node.op is Op.DATA
        }

    def works_on(self, node: Node) -> tuple[int, ...]:
        """Return the axes whose rows a node needs.

        A `concat` needs the axes of all its parts, a STATE node needs none, and any other node needs that of
        its inputs.
        """
        if node.op is Op.STATE:
            return ()
        return self.axes[node.rows_axis].parts if node.op is Op.CONCAT else (node.axis,)

    def carried(self, before: int, after: int) -> str:
        """Describe the edge from node ``before`` to node ``after``.

        It names the columns that ``after`` reads. If there are none, it names the roles whose weights are the
        reason to wait, or says that side effects are.
        """
        reasons = self.order.edges[before, after]
        weights = f"weights of {', '.join(reasons['weights'])}" if reasons["weights"] else ""
        return ", ".join(reasons["columns"]) or weights or ", ".join(reasons["effects"])

    def readers(self) -> dict[Column, list[int]]:
        """For each column that is read, the ids of its readers."""
        readers: dict[Column, list[int]] = {}
        for node in self.nodes:
            for item in node.inputs:
                readers.setdefault(item.column, []).append(node.id)
        return readers

    def before(self, name: str) -> set[str]:
        """Return the names of all nodes that run before the node called ``name``."""
        return {self.nodes[i].name for i in nx.ancestors(self.order, self.by_name[name].id)}


def _edge(graph: nx.DiGraph, before: int, after: int, why: str, name: str) -> None:
    if not graph.has_edge(before, after):
        graph.add_edge(before, after, columns=[], weights=[], effects=[])
    reasons = graph.edges[before, after][why]
    if name not in reasons:
        reasons.append(name)


def weight_order(nodes: tuple[Node, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield (before, after, role) for each pair of nodes that a role's weights force into this order."""
    last_write: dict[str, int] = {}
    read_since: dict[str, list[int]] = {}
    for node in nodes:
        for role in sorted(node.reads | node.writes):
            if role in last_write:
                yield last_write[role], node.id, role
            if role in node.writes:
                for reader in read_since.pop(role, []):  # a model is read before it is written
                    yield reader, node.id, role
                last_write[role] = node.id
            else:
                read_since.setdefault(role, []).append(node.id)


def memory_order(nodes: tuple[Node, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield (before, after, memory) for each read of a memory and the write that follows it.

    Draws from a buffer also wait for each other, because each is counted.
    """
    for later in nodes:
        if later.op in (Op.WRITE, Op.PUT, Op.DRAW):
            for node in nodes[: later.id]:
                if later.memory in node.memories:
                    yield node.id, later.id, str(later.memory)


def skip_order(nodes: tuple[Node, ...]) -> Iterator[tuple[int, int]]:
    """Yield (before, after) for each node that may skip the iteration and each later one that a skip prevents.

    Otherwise, it would depend on timing whether a skipped iteration changes weights.
    """
    for node in nodes:
        if node.op in (Op.CHOOSE, Op.REPEAT):
            for later in nodes[node.id + 1 :]:
                if later.op is Op.UPDATE or later.impure_stage:
                    yield node.id, later.id


def all_nodes(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Yield the nodes, including those in `repeat` bodies."""
    for node in nodes:
        yield node
        yield from all_nodes(node.body.nodes if node.body else ())


def without_unread_parts(graph: Graph) -> Graph:
    """Return the graph without the columns ``part`` of `concat` nodes that no node reads.

    So graphs only differ by this column if they need it.
    """
    readers = graph.readers()
    unread = {
        Column(node.id, PART)
        for node in graph.nodes
        if node.op is Op.CONCAT and Column(node.id, PART) not in readers
    }
    nodes = (
        replace(node, outputs=tuple(out for out in node.outputs if Column(node.id, out.name) not in unread))
        for node in graph.nodes
    )
    results = tuple(item for item in graph.results if item.column not in unread)
    return replace(graph, nodes=tuple(nodes), results=results) if unread else graph


def used_nodes(graph: Graph) -> Iterator[Node]:
    """Yield all nodes of a flow and of its evaluation."""
    yield from all_nodes(graph.nodes)
    yield from all_nodes(graph.evaluation.nodes if graph.evaluation else ())
