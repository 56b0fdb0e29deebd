"""Draw graphs as text, Mermaid, DOT and SVG, and write them as JSON.

The SVG works without a network, scripts or other programs. All text in drawings is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Any

import networkx as nx

from rlflow.author.node_options import FollowOptions, UpdateOptions
from rlflow.author.schedule import ALWAYS
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.errors import printable

STORED = ("[(", ")]")
SHAPES = {
    Op.DATA: STORED,
    Op.STATE: STORED,
    Op.READ: STORED,
    Op.WRITE: STORED,
    Op.DRAW: STORED,
    Op.PUT: STORED,
    Op.UPDATE: ("[[", "]]"),
    Op.FOLLOW: ("[[", "]]"),
    Op.REPEAT: ("{{", "}}"),
}
# pixels: width of a letter, height of a line, padding in a box, gap between boxes, distance between layers
LETTER, LINE, PADDING, GAP, APART = 7.0, 17.0, 10.0, 18.0, 46.0
SWEEPS = 8  # number of passes that sort each layer by the positions of neighbouring nodes
COLORS = {
    Op.DATA: "#e8e8e8",
    Op.STATE: "#e8e8e8",
    Op.READ: "#e8e8e8",
    Op.WRITE: "#e8e8e8",
    Op.DRAW: "#e8e8e8",
    Op.PUT: "#e8e8e8",
    Op.GENERATE: "#d5e8f7",
    Op.UPDATE: "#f9dcc8",
    Op.FOLLOW: "#f9dcc8",
    Op.REWARD: "#d9efd3",
    Op.REPEAT: "#ece2f5",
}
OTHER = "#fff8dc"
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>'
)
Notes = Mapping[int, str]  # node → a second line of its box


def text(graph: Graph) -> str:
    """Draw the graph as text, with one line per node: its name and the columns it reads and returns."""
    lines = [
        printable(
            f"flow {graph.name}" + (f"({', '.join(f'{k}={v}' for k, v in graph.hp)})" if graph.hp else ""),
            keep="",
        )
    ]
    lines += _text_nodes(graph, "  ")
    if graph.evaluation:
        lines += [f"  evaluation {graph.evaluation.name}", *_text_nodes(graph.evaluation, "  | ")]
    lines += [
        f"  state {slot.name} = {slot.initial:g}, then {graph.nodes[slot.final.node].name}.{slot.final.name}"
        for slot in graph.state
    ]
    lines += [f"  keeps {slot.name}: {slot.spec}" for slot in graph.memory]
    return "\n".join(lines)


def _text_nodes(graph: Graph, indent: str) -> Iterator[str]:
    width = max(len(node.name) for node in graph.nodes)
    for node in graph.nodes:
        reads = ", ".join(_reads(graph, node))
        gives = ", ".join(
            f"{output.name}: {output.kind}" if output.kind else output.name for output in node.outputs
        )
        mode = (
            ""
            if node.op in (Op.DATA, Op.STATE, Op.REPEAT, Op.READ, Op.WRITE, Op.DRAW, Op.PUT, Op.FOLLOW)
            else f" [{node.dispatch if node.op is not Op.UPDATE else 'UPDATE'}]"
        )
        step = f"  of {joint}" if (joint := joint_losses(node)) else followed(node)
        yield (
            f"{indent}{node.name:<{width}}{mode}"
            + (f"  ({reads})" if reads else "")
            + (f" -> {gives}" if gives else "")
            + step
            + (f"  {node.schedule}" if node.schedule != ALWAYS else "")
        )
        if node.body:
            yield from _text_nodes(node.body, indent + "  | ")


def joint_losses(node: Node) -> str:
    """Describe the objective of an update with several losses, or return "" for any other node.

    Each loss is shown with its factor, its average, and the column that selects its rows: ``policy (tokens) +
    0.1 likelihood (tokens, where right)``.
    """
    settings = node.settings
    if not isinstance(settings, UpdateOptions) or not settings.losses:
        return ""
    means = settings.mean if isinstance(settings.mean, tuple) else (settings.mean,) * len(settings.losses)
    each = zip(settings.losses, settings.scale or (), means, settings.where or (), strict=True)
    return " + ".join(
        f"{'' if factor == 1 else f'{factor:g} '}{loss} ({average}{f', where {column}' if column else ''})"
        for loss, factor, average, column in each
    )


def followed(node: Node) -> str:
    """Describe how a role's weights follow another's, or return "" for any other node."""
    if not isinstance(node.settings, FollowOptions):
        return ""
    return f"  <- {node.settings.follows}, mix={node.settings.mix:g}"


def label(node: Node) -> str:
    """Return a node's text in a drawing: its name, and the objective if it has several losses."""
    return f"{node.name}: {joint}" if (joint := joint_losses(node)) else node.name


def _reads(graph: Graph, node: Node) -> Iterator[str]:
    for item in node.inputs:
        giver = graph.nodes[item.column.node]
        renamed = f"{item.parameter}=" if item.parameter != item.column.name else ""
        if node.memory and item.parameter == "key":
            renamed = "by "  # after key=, the name of a column would be masked as if it were a secret
        yield f"{renamed}{giver.name}.{item.column.name}"


def _reduced(graph: Graph) -> Iterator[tuple[Node, Node, str]]:
    """Yield (from, to, what the edge carries) for each edge not implied by others."""
    for before, after in sorted(nx.transitive_reduction(graph.order).edges):
        yield graph.nodes[before], graph.nodes[after], graph.carried(before, after)


def mermaid(graph: Graph) -> str:
    """Draw a graph as a Mermaid flowchart, for Markdown pages. Edges implied by others are left out."""
    lines = ["flowchart TD", *_mermaid_lines(graph, "  n")]
    if graph.evaluation:
        title = _quoted(f"evaluation {graph.evaluation.name}")
        lines += [f'  subgraph evaluation["{title}"]', *_mermaid_lines(graph.evaluation, "  e"), "  end"]
    return "\n".join(lines)


def _mermaid_lines(graph: Graph, start: str) -> Iterator[str]:
    """Yield a Mermaid line per node and edge. ``start`` comes before the node's number in each line."""
    for node in graph.nodes:
        opening, closing = SHAPES.get(node.op, ("[", "]"))
        yield f'{start}{node.id}{opening}"{_quoted(label(node))}"{closing}'
    for before, after, carried in _reduced(graph):
        yield f'{start}{before.id} -->|"{_quoted(carried)}"| {start.strip()}{after.id}'


def _quoted(label: str) -> str:
    return label.replace("#", "#35;").replace('"', "#quot;")


def dot(graph: Graph) -> str:
    """Draw a graph in Graphviz's DOT language. Edges implied by others are left out."""
    lines = [f"digraph {_dotted(graph.name)} {{", "  node [shape=box];"]
    lines += _dot_lines(graph, "  n")
    if graph.evaluation:
        lines += [
            "  subgraph cluster_evaluation {",
            f"  label={_dotted(f'evaluation {graph.evaluation.name}')};",
        ]
        lines += [*_dot_lines(graph.evaluation, "  e"), "  }"]
    return "\n".join([*lines, "}"])


def _dot_lines(graph: Graph, start: str) -> Iterator[str]:
    """Yield a DOT line per node and edge. ``start`` comes before the node's number in each line."""
    yield from (f"{start}{node.id} [label={_dotted(label(node))}];" for node in graph.nodes)
    yield from (
        f"{start}{a.id} -> {start.strip()}{b.id} [label={_dotted(carried)}];"
        for a, b, carried in _reduced(graph)
    )


def _dotted(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)


def as_json(graph: Graph) -> str:
    """Return the graph as JSON. Numbers that JSON lacks are written as strings: "inf", "nan"."""
    fields = graph.as_fields()
    if fields["evaluation"] is None:
        del fields["evaluation"]
    return json.dumps(_finite(fields), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Box:
    """The position and size of a node's box, in pixels."""

    x: float  # of its centre
    y: float  # of its upper edge
    width: float
    height: float


def html(graph: Graph, notes: Notes = MappingProxyType({}), more: Sequence[str] = ()) -> str:
    """Draw a graph and its repeats as HTML, followed by the lines ``more``.

    ``notes``: a second line of text for nodes' boxes.
    """
    parts = [_titled(f"flow {graph.name}", svg(graph, notes))]
    parts += [_titled(f"repeated by {node.name}", svg(node.body)) for node in graph.nodes if node.body]
    if more:
        parts.append(f"<pre>{escape(printable(chr(10).join(more)))}</pre>")
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _titled(title: str, picture: str) -> str:
    return f'<div style="font:13px sans-serif;margin:6px 0">{escape(printable(title))}</div>{picture}'


def svg(graph: Graph, notes: Notes = MappingProxyType({})) -> str:
    """Draw a graph as SVG, from top to bottom, with a box per node and an arrow per edge.

    Arrows implied by others are left out. Tooltips show what an arrow carries, and where a node's call is.
    ``notes``: a second line of text for nodes' boxes.
    """
    notes = {node.id: joint for node in graph.nodes if (joint := joint_losses(node))} | dict(notes)
    layers = [list(layer) for layer in nx.topological_generations(graph.order)]
    routes = routed(layers, sorted(nx.transitive_reduction(graph.order).edges))
    boxes = placed(graph, layers, list(routes.values()), notes)
    width = max(box.x + box.width / 2 for box in boxes.values()) + GAP
    height = max(box.y + box.height for box in boxes.values()) + GAP
    lines = [_arrow([boxes[i] for i in route], graph.carried(*edge)) for edge, route in routes.items()]
    drawn = [_box(node, boxes[node.id], notes.get(node.id, "")) for node in graph.nodes]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 '
        f'{width:.0f} {height:.0f}" '
        f'font-family="sans-serif" font-size="12">{ARROW}{"".join(lines)}{"".join(drawn)}</svg>'
    )


def routed(layers: list[list[int]], edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Route each arrow: for each edge, return the nodes and places that its arrow passes, from start to end.

    To keep an arrow from crossing boxes, it gets a place of its own, with a negative number, in each layer
    between its ends. These places are added to ``layers``.
    """
    level = {i: number for number, layer in enumerate(layers) for i in layer}
    routes, added = {}, 0
    for a, b in edges:
        routes[a, b] = [a]
        for number in range(level[a] + 1, level[b]):
            added -= 1
            layers[number].append(added)
            routes[a, b].append(added)
        routes[a, b].append(b)
    return routes


def placed(
    graph: Graph, layers: list[list[int]], routes: Sequence[Sequence[int]], notes: Notes
) -> dict[int, Box]:
    """Position a box for each node and for each place of an arrow, sorting ``layers`` from left to right.

    ``routes``: the nodes and places that each arrow passes. ``notes``: a second line of text for nodes'
    boxes.
    """
    _sort(layers, [edge for route in routes for edge in pairwise(route)])
    texts = {node.id: _texts(node, notes.get(node.id, "")) for node in graph.nodes}
    sizes = {
        i: (LETTER * max(map(len, lines)) + 2 * PADDING, LINE * len(lines) + PADDING)
        for i, lines in texts.items()
    }
    sizes |= {i: (0.0, LINE + PADDING) for layer in layers for i in layer if i < 0}
    widths = [sum(sizes[i][0] for i in layer) + GAP * (len(layer) - 1) for layer in layers]
    boxes, y = {}, GAP
    for layer, width in zip(layers, widths, strict=True):
        x = GAP + (max(widths) - width) / 2
        for i in layer:
            boxes[i] = Box(x + sizes[i][0] / 2, y, *sizes[i])
            x += sizes[i][0] + GAP
        y += max(sizes[i][1] for i in layer) + APART
    return boxes


def _sort(layers: list[list[int]], edges: Sequence[tuple[int, int]]) -> None:
    """Sort each layer by its neighbours' mean positions, so that few arrows cross.

    This is Sugiyama's barycenter method.
    """
    neighbours: dict[int, list[int]] = {}
    for a, b in edges:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    for _ in range(SWEEPS):
        places = {i: (number + 0.5) / len(layer) for layer in layers for number, i in enumerate(layer)}
        for layer in layers:
            layer.sort(
                key=lambda i: (fmean(places[j] for j in neighbours[i]) if i in neighbours else places[i], i)
            )


def _texts(node: Node, note: str) -> list[str]:
    return [printable(node.name, keep=""), *([printable(note, keep="")] if note else [])]


def _box(node: Node, box: Box, note: str) -> str:
    lines = _texts(node, note)
    spans = "".join(
        f'<text x="{box.x:.1f}" y="{box.y + PADDING / 2 + LINE * (number + 0.8):.1f}" text-anchor="middle" '
        f'fill="{"#222" if not number else "#666"}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    gives = ", ".join(str(output.name) for output in node.outputs)
    about = "\n".join(
        filter(None, [str(node.place) if node.place else "", f"gives {gives}" if gives else ""])
    )
    return (
        f'<g><title>{escape(printable(about))}</title><rect x="{box.x - box.width / 2:.1f}" '
        f'y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="5" fill="{COLORS.get(node.op, OTHER)}" stroke="#999"/>{spans}</g>'
    )


def _arrow(boxes: Sequence[Box], label: str) -> str:
    """Draw an SVG arrow from the first box to the last, through those in between. ``label``: its tooltip."""
    path = f"M{boxes[0].x:.1f},{boxes[0].y + boxes[0].height:.1f}"
    for before, after in pairwise(boxes):
        start, end = before.y + before.height, after.y
        bend = (end - start) / 2
        path += (
            f" V{start:.1f} C{before.x:.1f},{start + bend:.1f} {after.x:.1f},{end - bend:.1f} "
            f"{after.x:.1f},{end:.1f}"
        )
    return (
        f'<path d="{path}" fill="none" stroke="#999" '
        f'marker-end="url(#arrow)"><title>{escape(printable(label))}</title></path>'
    )


FORMATS: dict[str, Callable[[Graph], str]] = {
    "text": text,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
    "json": as_json,
}
