"""The pass ``prune``, which keeps only columns that are read and drops nodes that nothing needs.

Also the pass ``reuse``, which finds forward passes whose autograd graph the role's next update can use.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlflow.author.node_options import ConcatOptions, UpdateOptions
from rlflow.compiler.graph.model import Column, Input, Node, Op
from rlflow.compiler.passes.recording import RECORDED, VERSION, last, of_policies, scored_columns
from rlflow.compiler.plan import FORWARDS, PassNote, Plan


def prune(plan: Plan) -> Plan:
    """Drop columns that nothing reads, and forward passes whose results nothing reads.

    Samples, state and the run's metrics count as readers. Stages are never dropped, because it isn't known
    before a run whether they return metrics.
    """
    graph = plan.graph
    results = {item.column for item in graph.results} if plan.keep_until_end else set()
    records, policies = last(graph), of_policies(graph, plan.idle)
    scores = scored_columns(graph, policies, plan.idle)
    watched = {column for columns in (records, *policies.values()) for column in columns.values()}
    watched |= {column for columns in scores.values() for column in columns}
    recorded = frozenset(
        {column for column in watched if column.name in (*RECORDED, VERSION)}
        | results
        | {slot.final for slot in graph.state}
    )
    live: set[int] = set()
    needed = set(recorded)
    for node in reversed(graph.nodes):
        outputs = {Column(node.id, output.name) for output in node.outputs}
        if node.op is not Op.IDLE and (outputs & needed or node.op not in FORWARDS):
            live.add(node.id)
            needed |= {
                item.column for item in node.inputs if node.op is not Op.CONCAT or _joins(node, item, needed)
            }
    total = sum(len(node.outputs) for node in graph.nodes)
    columns = frozenset(c for c in needed if any(o.name == c.name for o in graph.nodes[c.node].outputs))
    dead = [node.name for node in graph.nodes if node.id not in live and node.op is not Op.IDLE]
    what = f"{len(columns)} of {total} columns are read" + (f"; dropped {', '.join(dead)}" if dead else "")
    order = tuple(sorted(live))
    note = PassNote("prune", what)
    return replace(
        plan,
        live=order,
        columns=columns,
        keep_until_end=recorded | (watched & columns),
        records=records,
        policies=policies,
        judged=scores,
        notes=(*plan.notes, note),
    )


def _joins(node: Node, item: Input, needed: set[Column]) -> bool:
    """Return True if this input belongs to a joined column that is needed.

    The ``tokens`` of a part are also needed if another needed column is filled for it, because they say how
    many values each row gets.
    """
    part, _, name = item.parameter.partition(".")
    if Column(node.id, name) in needed:
        return True
    given = {each.parameter for each in node.inputs}
    return name == "tokens" and any(
        Column(node.id, filled) in needed and f"{part}.{filled}" not in given
        for filled, _ in node.options(ConcatOptions).fill
    )


def reuse(plan: Plan) -> Plan:
    """Let an update reuse the autograd graph of the role's last forward pass over the same rows.

    This only works for the first update. If another update comes in between, nothing is reused, because both
    autograd graphs would be in memory at once.
    """
    nodes = [plan.graph.nodes[i] for i in plan.live]
    first = next((node for node in nodes if node.writes), None)
    before = [
        node
        for node in nodes
        if first and node.op in FORWARDS and node.role == first.role and node.id < first.id
    ]
    if (
        first is None
        or first.op is not Op.UPDATE
        or first.rows != "row"
        or not before
        or before[-1].axis != first.axis
    ):
        return replace(
            plan,
            notes=(*plan.notes, PassNote("reuse", "no update reuses an earlier forward")),
        )
    if before[-1].id in plan.in_pieces:
        return replace(
            plan,
            notes=(
                *plan.notes,
                PassNote("reuse", f"{before[-1].name} is in pieces, so {first.name} computes it again"),
            ),
        )
    rows = first.options(UpdateOptions).minibatch
    ahead = {before[-1].id: float(rows) if rows is not None else math.inf}
    upto = f", at most {rows} rows per step" if rows is not None else ""
    return replace(
        plan,
        ahead=ahead,
        notes=(*plan.notes, PassNote("reuse", f"{first.name} reuses {before[-1].name}{upto}")),
    )
