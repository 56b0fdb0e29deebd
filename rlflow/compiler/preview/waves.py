"""When nodes can run: in waves of nodes that can run at the same time, and in pairs that can overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import networkx as nx

from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.layouts import Layouts
from rlflow.compiler.simulate import INSTANT


@dataclass(frozen=True)
class WaveNode:
    """A node of the plan and the number of its wave."""

    name: str  # name of the node
    op: str  # its kind of call
    wave: int  # number of nodes before it on the longest chain, within its repeat
    pool: str | None  # None in one process
    lane: str  # its executor queue
    dispatch: str  # its dispatch mode
    layout: str  # layout of the rows that it reads
    split_of: str | None = None  # the node that the layout was made for
    within: str | None = None  # the repeat that it belongs to
    chunks: int = 1  # number of chunks that its rows are processed in


@dataclass(frozen=True)
class Pair:
    """Two nodes that can run at the same time. The second may wait for chunks of the first."""

    first: str
    second: str
    # their common queue if it runs one node at a time, so they alternate; None if they overlap
    lane: str | None = None


def steps(plan: Plan, layouts: Layouts | None, within: str | None = None) -> Iterator[WaveNode]:
    """Yield the nodes wave by wave, each wave in program order.

    Nodes in the body of a `repeat` come right after it.
    """
    for wave, nodes in enumerate(waves(plan)):
        for node in nodes:
            yield _step(plan, layouts, node, wave, within)
            if node.id in plan.bodies:
                yield from steps(
                    plan.bodies[node.id], layouts.bodies[node.id] if layouts else None, node.name
                )


def _step(plan: Plan, layouts: Layouts | None, node: Node, wave: int, within: str | None) -> WaveNode:
    layout = layouts.needed.get(node.id) if layouts else None
    dispatch = {Op.UPDATE: "UPDATE", Op.REPEAT: ""}.get(node.op, node.dispatch)
    pool = plan.home.get(node.id) if node.op is not Op.REPEAT else None
    return WaveNode(
        node.name,
        node.op.value,
        wave,
        pool,
        plan.works_in(node.id),
        dispatch,
        str(layout or ""),
        layout.of if layout and layout.of != node.name else None,
        within,
        len(plan.in_pieces.get(node.id, ())) or 1,
    )


def waves(plan: Plan) -> list[list[Node]]:
    """Group the nodes that run a call into waves.

    A node's wave is the length of the longest chain of nodes that run before it.
    """
    running = [i for i in plan.live if plan.graph.nodes[i].op not in INSTANT]
    return [
        [plan.graph.nodes[i] for i in sorted(wave)]
        for wave in nx.topological_generations(plan.graph.order.subgraph(running))
    ]


def pairs(plan: Plan, room: Mapping[str, int]) -> Iterator[Pair]:
    """Yield the pairs of nodes that can run at the same time, in program order.

    Neither node waits for the other, or the second only waits for chunks of the first. Pairs within repeats
    are included. ``room``: how many nodes each queue can run at once.
    """
    running = [i for i in plan.live if plan.graph.nodes[i].op not in INSTANT]
    before = {i: nx.ancestors(plan.graph.order, i) for i in running}
    for place, one in enumerate(running):
        for other in running[place + 1 :]:
            if one not in before[other] and other not in before[one]:
                lane = plan.works_in(one)
                queue_is_full = lane == plan.works_in(other) and room.get(lane) == 1
                yield Pair(
                    plan.graph.nodes[one].name, plan.graph.nodes[other].name, lane if queue_is_full else None
                )
            elif any(plan.pieces[i].source == one for i in plan.in_pieces.get(other, ())):
                yield Pair(plan.graph.nodes[one].name, plan.graph.nodes[other].name)
    for body in plan.bodies.values():
        yield from pairs(body, room)
