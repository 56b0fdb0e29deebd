"""The data flow of a plan: columns sent between nodes, weights sent to generators, and bytes moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.author.node_options import FollowOptions, UpdateOptions
from rlflow.compiler.byte_sizes import ModelFootprint
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, all_nodes
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.layouts import Layouts, RowLayout, alike, on_one_rank
from rlflow.compiler.preview.sizes import Sizes
from rlflow.compiler.preview.transfers import following, passage, transfer
from rlflow.training.weight_sync.transfer_plan import TransferPlan as Transfer


@dataclass(frozen=True)
class Edge:
    """The columns that one node reads from another node."""

    source: str  # name of the node that gives them
    target: str  # name of the node that reads them
    columns: tuple[str, ...]  # their names
    bytes: int  # bytes of all columns
    moved: int = 0  # bytes that are expected to move to a different rank
    from_pool: str | None = None  # None in one process
    to_pool: str | None = None  # None in one process
    # ``pool``: the columns go to another pool; ``split``: to other ranks of their pool; ``stays``: nothing
    # moves
    why: str = "stays"


@dataclass(frozen=True)
class WeightEdge:
    """The transfer of a role's weights to its generator, between an update and the next sampling call.

    Or to a role on another pool that follows it.
    """

    role: str  # owner of the weights
    after: str  # name of the update
    before: tuple[str, ...]  # names of the calls that sample, or of the node that follows
    from_pool: str  # pool of the trainer
    to_pool: str  # pool of the generator
    bytes: int | None  # bytes over all ranks; None if the number of parameters is unknown
    # with a transfer plan: the maximum number of bytes that a rank receives, and the lower bound for any plan
    each: int | None = None
    # with a transfer plan ``segment``, ``handles``, ``alltoall``, ``store`` or ``frozen``, else ``whole``
    transport: str = "whole"
    extra: int | None = None  # with a transfer plan: the maximum extra bytes that a transfer needs on a rank


def edges(plan: Plan, sizes: Sizes, layouts: Layouts | None) -> Iterator[Edge]:
    """Yield the edges of columns in program order. Edges in the body of a `repeat` come right after its own.

    layouts: None for a run in one process, where nothing moves.
    """
    brought: dict[Column, list[RowLayout | None]] = {}
    for i in plan.live:
        node = plan.graph.nodes[i]
        together: dict[tuple[int, RowLayout | None], list[Input]] = {}
        for item in node.inputs:
            if sizes.read(node, item):
                together.setdefault(
                    (item.column.node, _source_layout(item.column, node, layouts, brought)), []
                ).append(item)
        yield from (
            _edge(plan, sizes, layouts, node, items, origin) for (_, origin), items in together.items()
        )
        needed = layouts.needed.get(node.id) if layouts else None
        for item in (
            item
            for (_, origin), items in together.items()
            if origin and needed and origin.pool != needed.pool
            for item in items
        ):
            brought.setdefault(item.column, []).append(needed)
        if node.id in plan.bodies:
            yield from edges(
                plan.bodies[node.id], sizes.bodies[node.id], layouts.bodies[node.id] if layouts else None
            )


def _source_layout(
    column: Column, node: Node, layouts: Layouts | None, brought: Mapping[Column, Sequence[RowLayout | None]]
) -> RowLayout | None:
    """Return the layout from which a node reads a column, or None if unknown.

    Usually it's the layout in which the column was made. But an earlier node may have brought the column to
    this pool in another layout, which this node uses if it has the split that it needs, or if the node is an
    update, which can read any layout.
    """
    if layouts is None or column not in layouts.columns or node.id not in layouts.needed:
        return None
    origin, needed = layouts.columns[column], layouts.needed[node.id]
    known = [
        layout for layout in brought.get(column, ()) if layout and layout.pool == needed.pool != origin.pool
    ]
    return next((layout for layout in known if needed.by == "minibatch" or alike(layout, needed)), origin)


def _edge(
    plan: Plan, sizes: Sizes, layouts: Layouts | None, node: Node, items: list[Input], of: RowLayout | None
) -> Edge:
    """Return the edge for the columns ``items`` that ``node`` reads from another node.

    ``of``: the layout of these columns.
    """
    source, names = plan.graph.nodes[items[0].column.node].name, tuple(item.column.name for item in items)
    size = sum(sizes.read(node, item) for item in items)
    if layouts is None or plan.placement is None or of is None:
        return Edge(source, node.name, names, size)
    ranks = plan.placement.pools
    source_layout, needed = (on_one_rank(layout, ranks) for layout in (of, layouts.needed[node.id]))
    epochs = node.settings.epochs if isinstance(node.settings, UpdateOptions) else 1
    times = copies(source_layout, needed, ranks, epochs)
    moved = sum(int(sizes.sent(node, item) * times) for item in items)
    why = "stays" if not moved else "pool" if source_layout.pool != needed.pool else "split"
    return Edge(source, node.name, names, size, moved, source_layout.pool, needed.pool, why)


def copies(source: RowLayout, needed: RowLayout, ranks: Mapping[str, int], epochs: int) -> float:
    """Estimate how many times each row is sent to a rank that doesn't hold it.

    Different splits are treated as independent. For an update, each row goes to the update's pool once, where
    rows with non-finite values are dropped; then each epoch draws a new rank for each row.
    """
    count, elsewhere = ranks[needed.pool], source.pool != needed.pool
    if not elsewhere and alike(source, needed):
        return 0.0
    if needed.by == "all ranks":
        return float(count if elsewhere else count - 1)
    # the probability that a rank needs the row
    reached = 1 - (1 - 1 / count) ** epochs if needed.by == "minibatch" else 1 / count
    if elsewhere and needed.by != "minibatch":
        return count * reached
    return elsewhere + (count - 1) * reached


def weights(
    graph: Graph, placement: Placement, models: Mapping[str, ModelFootprint], ways: tuple[str, str]
) -> Iterator[WeightEdge]:
    """Yield the weight transfer of each role whose trainer and generator have different layouts.

    They do if they are on different pools, or are spread differently over the same pool. ways: the transport
    within a pool, and that between pools; ``gather`` means a transfer without a plan.
    """
    for role, source in placement.trainers.items():
        target = placement.generators.get(role)
        after = [node.name for node in graph.nodes if role in node.writes]
        if target is None or not after or role not in models:
            continue
        before = tuple(
            node.name for node in all_nodes(graph.nodes) if node.op is Op.GENERATE and node.role == role
        )
        footprint, ranks = models[role], placement.pools
        moved = WeightEdge(role, after[-1], before, source, target, None)
        transport = ways[source != target]
        if (plan := _planned(footprint, ranks, source, target)) is not None and transport != "gather":
            inbound = plan.stats.inbound
            yield replace(
                moved,
                bytes=int(inbound.sum()),
                each=int(inbound.max(initial=0)),
                transport=transport,
                extra=plan.stats.extra(transport),
            )
        elif target != source:
            yield replace(
                moved,
                bytes=None if footprint.weight_bytes is None else footprint.weight_bytes * ranks[target],
            )


def followed(
    graph: Graph, placement: Placement, models: Mapping[str, ModelFootprint], between: str
) -> Iterator[WeightEdge]:
    """Yield the transfer of weights to each role that follows a role on another pool.

    between: the transport between pools; ``gather`` means a transfer without a plan.
    """
    for node in graph.nodes:
        role = node.role or ""
        if not isinstance(node.settings, FollowOptions) or role not in models:
            continue
        other, ranks = node.settings.follows, placement.pools
        source, target = placement.trainers[other], placement.trainers[role]
        if source == target:
            continue
        after = [each.name for each in graph.nodes if other in each.writes]
        edge = WeightEdge(other, after[-1], (node.name,), source, target, None)
        plan = following(models[other], models[role], ranks[source], ranks[target])
        if plan is not None and between != "gather":
            inbound, extra = plan.stats.inbound, plan.stats.extra(between)
            yield replace(
                edge,
                bytes=int(inbound.sum()),
                each=int(inbound.max(initial=0)),
                transport=between,
                extra=extra,
            )
        else:
            size = models[role].weight_bytes
            yield replace(edge, bytes=None if size is None else size * ranks[target])


def _planned(
    footprint: ModelFootprint, ranks: Mapping[str, int], source: str, target: str
) -> Transfer | None:
    return (
        transfer(footprint, ranks[target])
        if source == target
        else passage(footprint, ranks[source], ranks[target])
    )
