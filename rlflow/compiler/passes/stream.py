"""The pass ``stream``: score rows in chunks while others are still being sampled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.plan import FORWARDS, PassNote, Piece, Plan


def stream(plan: Plan) -> Plan:
    """Cut reward calls and forward passes into pieces that can start before all rows are sampled.

    A node is only cut if the other rows of a call never affect a row's result, bit for bit, and if the node
    doesn't take turns with sampling on one pool. The sampling node then hands out its rows in chunks.
    """
    ids = itertools.count(len(plan.graph.nodes))
    chunks: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, Piece] = {}
    notes: list[str] = []
    for source in (plan.graph.nodes[i] for i in plan.live if plan.graph.nodes[i].op is Op.GENERATE):
        left = {node.id: why for node in _scores(plan, source) if (why := _why_unsplit(plan, source, node))}
        cut = [node.id for node in _scores(plan, source) if node.id not in left]
        notes.append(_streamed(plan, source, cut, left))
        if cut:
            chunks[source.id] = tuple(itertools.islice(ids, plan.streaming.chunks - 1))
            pieces |= {
                next(ids): Piece(node, source.id, chunk)
                for chunk in range(plan.streaming.chunks)
                for node in cut
            }
    what = (
        "; ".join(notes)
        if plan.streaming.chunks > 1 and notes
        else "nothing is scored before all rows are sampled"
    )
    lane = {**plan.lane, **{i: plan.lane[piece.node] for i, piece in pieces.items()}}
    lane |= {piece.node: "control" for piece in pieces.values()}
    return replace(
        plan, chunks=chunks, pieces=pieces, lane=lane, notes=(*plan.notes, PassNote("stream", what))
    )


def _scores(plan: Plan, source: Node) -> Iterator[Node]:
    """Yield the reward calls and forward passes that read the rows sampled by ``source``."""
    for node in (plan.graph.nodes[i] for i in plan.live):
        if node.axis == source.makes and node.op in (Op.REWARD, *FORWARDS):
            yield node


def _why_unsplit(plan: Plan, source: Node, node: Node) -> str:
    """Say why ``node`` needs all rows of ``source`` at once, or return "" if it can take chunks."""
    streaming, role = plan.streaming, node.role or ""
    models = any(use.name == role and use.own_model for use in plan.graph.roles)
    if streaming.chunks < 2:
        return "off"
    if source.role not in streaming.by:
        return f"the generator of {source.role} gives all rows at once"
    if models and plan.home.get(node.id) == plan.home.get(source.id):
        return f"alternates with {source.name}"
    if role not in streaming.exact:
        return "rounding depends on the other rows"
    late = [
        plan.graph.nodes[j].name
        for j in _dependents(plan, source)
        if j in {item.column.node for item in node.inputs}
    ]
    return f"reads {late[0]}, which waits for all rows" if late else ""


def _dependents(plan: Plan, source: Node) -> set[int]:
    """Return the ids of the nodes that wait for ``source``, directly or indirectly."""
    nodes: set[int] = set()
    for i in plan.live:
        if plan.waits_for[i] & (nodes | {source.id}):
            nodes.add(i)
    return nodes


def _streamed(plan: Plan, source: Node, cut: list[int], left: Mapping[int, str]) -> str:
    """Describe, for the plan's notes, which nodes get the rows of ``source`` in chunks, and why others don't.

    ``cut``: ids of the nodes that get chunks. ``left``: id of each other node → the reason.
    """
    names = ", ".join(plan.graph.nodes[i].name for i in cut)
    first = (
        f"{source.name} gives {plan.streaming.chunks} chunks to {names}"
        if cut
        else f"{source.name} gives all rows at once"
    )
    reasons: dict[str, list[str]] = {}
    for i, why in left.items():
        reasons.setdefault(why, []).append(plan.graph.nodes[i].name)
    return first + "".join(f"; not to {', '.join(nodes)} ({why})" for why, nodes in reasons.items())
