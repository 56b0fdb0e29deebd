"""The graph of one iteration: frozen data, and the orders that follow from it. Algorithms on it are
networkx's.

Edges are columns: an input names the node that gives it. Weights are versioned state: a model is read before
it is written and after its last write, and two writes keep program order; so do stages with side effects.
Those orders are edges as well, derived here and stored nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import networkx as nx

from rlflow.author.columns import Kind
from rlflow.author.node_options import AnyOptions, NodeOptions, Pairs
from rlflow.errors import Place

Own = TypeVar("Own", bound=NodeOptions)


class Op(StrEnum):
    """Kinds of nodes. DATA and STATE are where columns come from; the other kinds run something."""

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
    CHOOSE = "choose"
    CONCAT = "concat"


@dataclass(frozen=True)
class Column:
    """A reference to one output of one node."""

    node: int
    name: str


SETTING = "setting."  # how the parameter of an input begins that is a setting of the call


@dataclass(frozen=True)
class Input:
    """The column that a parameter reads; of a setting that is a scalar column the parameter is its name after
    SETTING."""

    parameter: str
    column: Column


@dataclass(frozen=True)
class Output:
    """A column that a node gives."""

    name: str
    kind: Kind | None
    source: str  # the name by which the function or the verb knows it


@dataclass(frozen=True)
class RowAxis:
    """Rows of the graph, and how they came from other rows."""

    parent: int | None = None  # the axis they came from
    # rows that were sampled from each, or that are left of each chosen group; 0: unknown until run
    samples: int = 0
    grouped: bool = False
    step: str = "sampled"  # asked, cut (asked for single tokens of a row), chosen, joined
    parts: tuple[int, ...] = ()  # of joined rows the axes that they are of, one after another


@dataclass(frozen=True)
class Node:
    """One call of a flow."""

    id: int
    op: Op
    name: str
    axis: int  # of the rows of its inputs
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    settings: AnyOptions = NodeOptions()
    role: str | None = None
    dispatch: str = "DP_COMPUTE"  # how its rows go to the ranks of a pool
    rows: str = "row"  # "group" where the rows of a group have to be together
    makes: int | None = None  # the axis of its outputs, where that is another
    call: int = 0  # its number in program order, from which chance is derived
    digest: str = ""  # of the function's source
    timeout: float = 300.0  # seconds
    pure: bool = True  # whether it changes nothing but its outputs
    place: Place | None = None  # of the call in the user's file; no part of the node's identity
    definition: Place | None = None  # of the function; no part of the node's identity
    body: Graph | None = None  # of a repeat

    @property
    def rows_axis(self) -> int:
        """The axis of the outputs."""
        return self.axis if self.makes is None else self.makes

    @property
    def writes(self) -> frozenset[str]:
        """Roles whose weights this node may change."""
        own = (
            {self.role}
            if self.role and (self.op is Op.UPDATE or (self.op is Op.STAGE and not self.pure))
            else set()
        )
        return frozenset(
            own | {role for node in (self.body.nodes if self.body else ()) for role in node.writes}
        )

    @property
    def reads(self) -> frozenset[str]:
        """Roles whose weights this node reads."""
        own = {self.role} if self.role else set()
        return frozenset(
            own | {role for node in (self.body.nodes if self.body else ()) for role in node.reads}
        )

    @property
    def impure_stage(self) -> Node | None:
        """The first stage with side effects that this node runs: itself, or one in its body; None where it
        runs none."""
        if self.op is Op.STAGE and not self.pure:
            return self
        return next(
            (stage for node in (self.body.nodes if self.body else ()) if (stage := node.impure_stage)), None
        )

    def options(self, kind: type[Own]) -> Own:
        """The settings of a call that has settings of this kind."""
        assert isinstance(self.settings, kind)
        return self.settings

    def output(self, name: str) -> Output:
        """The output of this name. Raises StopIteration where the node has none."""
        return next(output for output in self.outputs if output.name == name)


# of a role: what learns and computes with its model, and what samples from it
HALVES = ("trainer", "generator")


@dataclass(frozen=True)
class RoleUse:
    """How a flow uses a role."""

    name: str
    trained: bool = False
    head: str = "logprobs"  # or values, scores
    generates: bool = False  # whether it samples
    rewards: bool = False  # whether it is called as a reward


@dataclass(frozen=True)
class StateSlot:
    """A scalar that lives across iterations: its initial value, and the column that holds it at the end of an
    iteration."""

    name: str
    initial: float
    final: Column


@dataclass(frozen=True)
class Graph:
    """One iteration of an algorithm at given settings."""

    name: str
    nodes: tuple[Node, ...]
    axes: tuple[RowAxis, ...]
    hp: Pairs = ()
    roles: tuple[RoleUse, ...] = ()
    state: tuple[StateSlot, ...] = ()
    results: tuple[Input, ...] = ()  # the columns that the flow, or the body of a repeat, returns
    rows: int = 0  # the axis of the results
    # run on held-out prompts, where the flow says so itself; its first node gives these
    evaluation: Graph | None = None

    def __str__(self) -> str:
        from rlflow.compiler.graph.draw import text

        return text(self)

    def _repr_html_(self) -> str:
        """A picture, as notebooks show it."""
        from rlflow.compiler.graph.draw import html

        return html(self)

    def as_fields(self) -> dict[str, Any]:
        """The graph as plain values, settings as they are shown."""
        fields = asdict(self)
        for node, own in zip(self.nodes, fields["nodes"], strict=True):
            own |= {"settings": node.settings.shown, "body": node.body and node.body.as_fields()}
        return fields | {"evaluation": self.evaluation and self.evaluation.as_fields()}

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def changed_roles(self) -> tuple[str, ...]:
        """Roles whose weights an iteration may change: an update trains them, or a stage with side effects
        has their trainer."""
        written = {role for node in self.nodes for role in node.writes}
        return tuple(use.name for use in self.roles if use.name in written)

    @cached_property
    def order(self) -> nx.DiGraph:
        """Nodes by id; an edge for each reason to wait: ``columns`` read, ``weights`` of a role, or
        ``effects``, since stages with side effects keep program order. A node that reads no column of some
        rows that it works on still waits for whatever makes them."""
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
        return graph

    @cached_property
    def makers(self) -> dict[int, int]:
        """Axis → the id of the node that makes its rows."""
        return {
            node.rows_axis: node.id
            for node in reversed(self.nodes)
            if node.makes is not None or node.op is Op.DATA
        }

    def works_on(self, node: Node) -> tuple[int, ...]:
        """The axes whose rows a node needs: those of its inputs, and of a join those of each part."""
        if node.op is Op.STATE:
            return ()
        return self.axes[node.rows_axis].parts if node.op is Op.CONCAT else (node.axis,)

    def carried(self, before: int, after: int) -> str:
        """What an edge of the order stands for, in words: columns; without any, weights of roles; without
        these, side effects."""
        reasons = self.order.edges[before, after]
        weights = f"weights of {', '.join(reasons['weights'])}" if reasons["weights"] else ""
        return ", ".join(reasons["columns"]) or weights or ", ".join(reasons["effects"])

    def readers(self) -> dict[Column, list[int]]:
        """The ids of the nodes that read each column. Columns that nothing reads are absent."""
        readers: dict[Column, list[int]] = {}
        for node in self.nodes:
            for item in node.inputs:
                readers.setdefault(item.column, []).append(node.id)
        return readers

    def before(self, name: str) -> set[str]:
        """Names of all nodes that run before the one named."""
        return {self.nodes[i].name for i in nx.ancestors(self.order, self.by_name[name].id)}


def _edge(graph: nx.DiGraph, before: int, after: int, why: str, name: str) -> None:
    if not graph.has_edge(before, after):
        graph.add_edge(before, after, columns=[], weights=[], effects=[])
    reasons = graph.edges[before, after][why]
    if name not in reasons:
        reasons.append(name)


def weight_order(nodes: tuple[Node, ...]) -> Iterator[tuple[int, int, str]]:
    """(before, after, role) for each pair of nodes that a role's weights put in order."""
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
