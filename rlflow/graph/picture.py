"""A graph as a picture for notebooks: SVG that needs no network, no script and no other program. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

import networkx as nx

from rlflow.errors import printable
from rlflow.graph.draw import joint_losses
from rlflow.graph.model import Graph, Node, Op

LETTER, LINE, PADDING, GAP, APART = 7.0, 17.0, 10.0, 18.0, 46.0  # pixels: of a letter, a line, in a box, between boxes, between layers
SWEEPS = 8  # times that layers are put in the order of what they are connected with
COLORS = {Op.DATA: "#e8e8e8", Op.STATE: "#e8e8e8", Op.GENERATE: "#d5e8f7", Op.UPDATE: "#f9dcc8", Op.REWARD: "#d9efd3", Op.REPEAT: "#ece2f5"}
OTHER = "#fff8dc"
ARROW = ('<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
         '<path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>')
Notes = Mapping[int, str]  # node → a second line of its box


@dataclass(frozen=True)
class Box:
    """The box of a node."""

    x: float  # of its middle
    y: float  # of its upper edge
    width: float
    height: float


def html(graph: Graph, notes: Notes = MappingProxyType({}), more: Sequence[str] = ()) -> str:
    """A graph, those of its repeats beneath it, and ``more`` lines of text, as HTML."""
    parts = [_titled(f"flow {graph.name}", svg(graph, notes))]
    parts += [_titled(f"repeated by {node.name}", svg(node.body)) for node in graph.nodes if node.body]
    if more:
        parts.append(f"<pre>{escape(printable(chr(10).join(more)))}</pre>")
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _titled(title: str, picture: str) -> str:
    return f'<div style="font:13px sans-serif;margin:6px 0">{escape(printable(title))}</div>{picture}'


def svg(graph: Graph, notes: Notes = MappingProxyType({})) -> str:
    """A drawing of a graph from top to bottom: a box for each node, an arrow for each reason to wait that no other implies. What an arrow
    carries, and where a node is called, show where the mouse rests."""
    notes = {node.id: joint for node in graph.nodes if (joint := joint_losses(node))} | dict(notes)
    layers = [list(layer) for layer in nx.topological_generations(graph.order)]
    routes = routed(layers, sorted(nx.transitive_reduction(graph.order).edges))
    boxes = placed(graph, layers, list(routes.values()), notes)
    width = max(box.x + box.width / 2 for box in boxes.values()) + GAP
    height = max(box.y + box.height for box in boxes.values()) + GAP
    lines = [_arrow([boxes[i] for i in route], graph.carried(*edge)) for edge, route in routes.items()]
    drawn = [_box(node, boxes[node.id], notes.get(node.id, "")) for node in graph.nodes]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'font-family="sans-serif" font-size="12">{ARROW}{"".join(lines)}{"".join(drawn)}</svg>')


def routed(layers: list[list[int]], edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Edge → the nodes that its arrow goes by. In each layer between its ends a place of its own is added for it, with a number below 0, so
    that it crosses no box."""
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


def placed(graph: Graph, layers: list[list[int]], routes: Sequence[Sequence[int]], notes: Notes) -> dict[int, Box]:
    """A box for each node: in the layer after the last node that it waits for, beside those that may run at the same time. ``layers`` are
    put in the order of their places from left to right."""
    _sort(layers, [edge for route in routes for edge in pairwise(route)])
    texts = {node.id: _texts(node, notes.get(node.id, "")) for node in graph.nodes}
    sizes = {i: (LETTER * max(map(len, lines)) + 2 * PADDING, LINE * len(lines) + PADDING) for i, lines in texts.items()}
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
    """Put each layer in the order of the mean places of its neighbours, so that few arrows cross (the barycenter method of Sugiyama)."""
    neighbours: dict[int, list[int]] = {}
    for a, b in edges:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    for _ in range(SWEEPS):
        places = {i: (number + 0.5) / len(layer) for layer in layers for number, i in enumerate(layer)}
        for layer in layers:
            layer.sort(key=lambda i: (fmean(places[j] for j in neighbours[i]) if i in neighbours else places[i], i))


def _texts(node: Node, note: str) -> list[str]:
    return [printable(node.name, keep=""), *([printable(note, keep="")] if note else [])]


def _box(node: Node, box: Box, note: str) -> str:
    lines = _texts(node, note)
    spans = "".join(f'<text x="{box.x:.1f}" y="{box.y + PADDING / 2 + LINE * (number + 0.8):.1f}" text-anchor="middle" '
                    f'fill="{"#222" if not number else "#666"}">{escape(line)}</text>' for number, line in enumerate(lines))  # fmt: skip
    gives = ", ".join(str(output.name) for output in node.outputs)
    about = "\n".join(filter(None, [str(node.place) if node.place else "", f"gives {gives}" if gives else ""]))
    return (f'<g><title>{escape(printable(about))}</title><rect x="{box.x - box.width / 2:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="5" fill="{COLORS.get(node.op, OTHER)}" stroke="#999"/>{spans}</g>')


def _arrow(boxes: Sequence[Box], label: str) -> str:
    """An arrow from the first box to the last, straight through the places between them."""
    path = f"M{boxes[0].x:.1f},{boxes[0].y + boxes[0].height:.1f}"
    for before, after in pairwise(boxes):
        start, end = before.y + before.height, after.y
        bend = (end - start) / 2
        path += f" V{start:.1f} C{before.x:.1f},{start + bend:.1f} {after.x:.1f},{end - bend:.1f} {after.x:.1f},{end:.1f}"
    return (f'<path d="{path}" fill="none" stroke="#999" marker-end="url(#arrow)"><title>{escape(printable(label))}</title></path>')
