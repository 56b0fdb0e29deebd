"""The differences between two graphs, node by node."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import networkx as nx

from rlflow.author.schedule import ALWAYS
from rlflow.compiler.graph.model import Graph, Node


@dataclass(frozen=True)
class Difference:
    """A difference between two graphs. Prints as one line."""

    sign: str  # "-": only in the first graph; "+": only in the second; "~": changed
    what: str

    def __str__(self) -> str:
        return f"{self.sign} {self.what}"


def diff(first: Graph, second: Graph, settings: bool = True) -> list[Difference]:
    """List the differences from ``first`` to ``second`` in settings, nodes, edges, state and evaluation.

    Nodes are matched by name. Equal graphs give an empty list. ``settings``: whether to compare settings.
    """
    return [
        *(_settings(first, second) if settings else ()),
        *_nodes(first, second, settings),
        *_state(first, second),
        *_evaluation(first, second, settings),
    ]


def same_shape(first: Graph, second: Graph) -> bool:
    """Return True if the graphs have the same operations and functions, connected in the same way.

    Only the names of their nodes may differ.
    """
    return bool(nx.is_isomorphic(_labelled(first), _labelled(second), _alike, operator.eq))


def _alike(one: Mapping[str, Node], other: Mapping[str, Node]) -> bool:
    """Return True if corresponding nodes of two graphs have the same operation and function.

    Bodies of repeats are compared as graphs, because their source text contains the names of roles.
    """
    a, b = one["node"], other["node"]
    if a.body is not None and b.body is not None:
        return same_shape(a.body, b.body)
    return (a.op, a.digest) == (b.op, b.digest)


def _labelled(graph: Graph) -> nx.DiGraph:
    """Convert a graph for networkx, with nodes as labels and the parameters that each edge feeds."""
    order = nx.DiGraph()
    order.add_nodes_from((node.id, {"node": node}) for node in graph.nodes)
    order.add_edges_from(
        (a, b, {"columns": sorted(why["columns"])}) for a, b, why in graph.order.edges(data=True)
    )
    return order


def _settings(first: Graph, second: Graph) -> Iterator[Difference]:
    one, two = dict(first.hp), dict(second.hp)
    yield from (Difference("-", f"setting {name} = {one[name]!r}") for name in one if name not in two)
    yield from (Difference("+", f"setting {name} = {two[name]!r}") for name in two if name not in one)
    changed = [name for name in one if name in two and one[name] != two[name]]
    yield from (Difference("~", f"setting {name}: {one[name]!r} -> {two[name]!r}") for name in changed)


def _nodes(first: Graph, second: Graph, settings: bool) -> Iterator[Difference]:
    one, two = first.by_name, second.by_name
    yield from (
        Difference("-", f"{name}: {_summary(first, node)}") for name, node in one.items() if name not in two
    )
    yield from (
        Difference("+", f"{name}: {_summary(second, node)}") for name, node in two.items() if name not in one
    )
    for name in one:
        if name in two:
            yield from (
                Difference("~", f"{name}: {change}")
                for change in _changes(first, one[name], second, two[name], settings)
            )


def _summary(graph: Graph, node: Node) -> str:
    return f"({', '.join(_sources(graph, node).values())}) -> {', '.join(output.name for output in node.outputs) or 'nothing'}"


def _sources(graph: Graph, node: Node) -> dict[str, str]:
    return {
        item.parameter: f"{graph.nodes[item.column.node].name}.{item.column.name}" for item in node.inputs
    }


def _changes(first: Graph, one: Node, second: Graph, two: Node, settings: bool) -> Iterator[str]:
    if one.digest != two.digest:
        yield f"the body changed ({one.digest} -> {two.digest})"
    for field in ("op", "dispatch", "rows", "role", "timeout", "pure"):
        if getattr(one, field) != getattr(two, field):
            yield f"{field} {getattr(one, field)} -> {getattr(two, field)}"
    yield from _mapping_changes("reads", _sources(first, one), _sources(second, two))
    if settings:
        yield from _mapping_changes("setting", _shown(one), _shown(two))
    yield from _mapping_changes(
        "gives", {o.name: str(o.kind) for o in one.outputs}, {o.name: str(o.kind) for o in two.outputs}
    )
    if one.body and two.body:
        yield from (f"in its body: {line}" for line in diff(one.body, two.body, settings))


def _shown(node: Node) -> dict[str, object]:
    """Return a node's settings, with ``every`` and ``after`` if it isn't due in all iterations."""
    schedule = {} if node.schedule == ALWAYS else {**vars(node.schedule)}
    return {**dict(node.shown), **schedule}


def _mapping_changes(what: str, one: Mapping[str, object], two: Mapping[str, object]) -> Iterator[str]:
    for name in [*one, *(name for name in two if name not in one)]:
        if name not in two:
            yield f"{what} {name} no longer (was {one[name]})"
        elif name not in one:
            yield f"{what} {name} ({two[name]})"
        elif one[name] != two[name]:
            yield f"{what} {name}: {one[name]} -> {two[name]}"


def _state(first: Graph, second: Graph) -> Iterator[Difference]:
    one, two = (
        {slot.name: slot.initial for slot in first.state},
        {slot.name: slot.initial for slot in second.state},
    )
    yield from (Difference("~", f"state {change}") for change in _mapping_changes("holds", one, two))


def _evaluation(first: Graph, second: Graph, settings: bool) -> Iterator[Difference]:
    one, two = first.evaluation, second.evaluation
    if one is not None and two is not None:
        yield from (Difference("~", f"in the evaluation: {line}") for line in diff(one, two, settings))
    elif one is not None:
        yield Difference("-", f"evaluation {one.name}")
    elif two is not None:
        yield Difference("+", f"evaluation {two.name}")
