"""A graph for people: text, Mermaid, DOT; and JSON for programs."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx

from rlflow.errors import printable
from rlflow.graph.model import Graph, Node, Op

SHAPES = {Op.DATA: ("[(", ")]"), Op.STATE: ("[(", ")]"), Op.UPDATE: ("[[", "]]"), Op.REPEAT: ("{{", "}}")}


def text(graph: Graph) -> str:
    """One line per node: its name, what it reads and from whom, what it gives."""
    lines = [printable(f"flow {graph.name}" + (f"({', '.join(f'{k}={v}' for k, v in graph.hp)})" if graph.hp else ""), keep="")]
    lines += _text_nodes(graph, "  ")
    if graph.evaluation:
        lines += [f"  evaluation {graph.evaluation.name}", *_text_nodes(graph.evaluation, "  | ")]
    lines += [f"  state {slot.name} = {slot.initial:g}, then {graph.nodes[slot.final.node].name}.{slot.final.name}" for slot in graph.state]
    return "\n".join(lines)


def _text_nodes(graph: Graph, indent: str) -> Iterator[str]:
    width = max(len(node.name) for node in graph.nodes)
    for node in graph.nodes:
        reads = ", ".join(_reads(graph, node))
        gives = ", ".join(f"{output.name}: {output.kind}" if output.kind else output.name for output in node.outputs)
        mode = "" if node.op in (Op.DATA, Op.STATE, Op.REPEAT) else f" [{node.dispatch if node.op is not Op.UPDATE else 'UPDATE'}]"
        step = f"  of {joint}" if (joint := joint_losses(node)) else ""
        yield f"{indent}{node.name:<{width}}{mode}" + (f"  ({reads})" if reads else "") + (f" -> {gives}" if gives else "") + step
        if node.body:
            yield from _text_nodes(node.body, indent + "  | ")


def joint_losses(node: Node) -> str:
    """The objective of an update with several losses, such as ``policy (tokens) + 0.1 likelihood (tokens, where right)``: of each
    loss its factor, its average and its own rows. Empty for any other node."""
    settings = dict(node.settings)
    losses = settings.get("losses")
    if not isinstance(losses, tuple):
        return ""
    scale, where, mean = (_each(settings.get(name), len(losses)) for name in ("scale", "where", "mean"))
    return " + ".join(f"{'' if factor == 1 else f'{factor:g} '}{loss} ({average}{f', where {column}' if column else ''})"
                      for loss, factor, average, column in zip(losses, scale, mean, where, strict=True))


def _each(value: Any, count: int) -> tuple[Any, ...]:
    """The value of each loss, of one for all or of a tuple, which is text where it is of several types."""
    if isinstance(value, str) and value.startswith("("):
        value = ast.literal_eval(value)
    return tuple(value) if isinstance(value, tuple) else (value,) * count


def label(node: Node) -> str:
    """The text of a node's box: its name, and what an update of several losses is made of."""
    return f"{node.name}: {joint}" if (joint := joint_losses(node)) else node.name


def _reads(graph: Graph, node: Node) -> Iterator[str]:
    for item in node.inputs:
        giver = graph.nodes[item.column.node]
        renamed = f"{item.parameter}=" if item.parameter != item.column.name else ""
        yield f"{renamed}{giver.name}.{item.column.name}"


def _reduced(graph: Graph) -> Iterator[tuple[Node, Node, str]]:
    """Edges that are not implied by others, with what they carry."""
    for before, after in sorted(nx.transitive_reduction(graph.order).edges):
        yield graph.nodes[before], graph.nodes[after], graph.carried(before, after)


def mermaid(graph: Graph) -> str:
    """Draw a graph as a Mermaid flowchart, as Markdown pages show it. Edges that others imply are left out."""
    lines = ["flowchart TD", *_mermaid_lines(graph, "  n")]
    if graph.evaluation:
        title = _quoted(f"evaluation {graph.evaluation.name}")
        lines += [f'  subgraph evaluation["{title}"]', *_mermaid_lines(graph.evaluation, "  e"), "  end"]
    return "\n".join(lines)


def _mermaid_lines(graph: Graph, start: str) -> Iterator[str]:
    """A line for each node and edge. ``start``: of the lines, up to the number of a node."""
    for node in graph.nodes:
        opening, closing = SHAPES.get(node.op, ("[", "]"))
        yield f'{start}{node.id}{opening}"{_quoted(label(node))}"{closing}'
    for before, after, carried in _reduced(graph):
        yield f'{start}{before.id} -->|"{_quoted(carried)}"| {start.strip()}{after.id}'


def _quoted(label: str) -> str:
    return label.replace("#", "#35;").replace('"', "#quot;")


def dot(graph: Graph) -> str:
    """Draw a graph in Graphviz's DOT language. Edges that others imply are left out."""
    lines = [f"digraph {_dotted(graph.name)} {{", "  node [shape=box];"]
    lines += _dot_lines(graph, "  n")
    if graph.evaluation:
        lines += ["  subgraph cluster_evaluation {", f"  label={_dotted(f'evaluation {graph.evaluation.name}')};"]
        lines += [*_dot_lines(graph.evaluation, "  e"), "  }"]
    return "\n".join([*lines, "}"])


def _dot_lines(graph: Graph, start: str) -> Iterator[str]:
    """A line for each node and edge. ``start``: of the lines, up to the number of a node."""
    yield from (f"{start}{node.id} [label={_dotted(label(node))}];" for node in graph.nodes)
    yield from (f"{start}{a.id} -> {start.strip()}{b.id} [label={_dotted(carried)}];" for a, b, carried in _reduced(graph))


def _dotted(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)


def as_json(graph: Graph) -> str:
    """Numbers that JSON has not are text: "inf", "nan"."""
    fields = dataclasses.asdict(graph)
    if fields["evaluation"] is None:
        del fields["evaluation"]
    return json.dumps(_finite(fields), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


FORMATS: dict[str, Callable[[Graph], str]] = {"text": text, "mermaid": mermaid, "dot": dot, "json": as_json}
