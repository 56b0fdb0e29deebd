"""Forwards whose graph the role's next update can go on from, if it takes all of their rows in its first step."""

from __future__ import annotations

import math
from dataclasses import replace

from rlflow.author.node_options import UpdateOptions
from rlflow.compiler.graph.model import Op
from rlflow.compiler.plan import FORWARDS, PassNote, Plan


def reuse(plan: Plan) -> Plan:
    """The last forward of a role before its first update, over the same rows. Not where another update comes between: memory would
    hold the graphs of both."""
    nodes = [plan.graph.nodes[i] for i in plan.live]
    first = next((node for node in nodes if node.writes), None)
    before = [node for node in nodes if first and node.op in FORWARDS and node.role == first.role and node.id < first.id]
    if first is None or first.op is not Op.UPDATE or first.rows != "row" or not before or before[-1].axis != first.axis:
        return replace(plan, notes=(*plan.notes, PassNote("reuse", "no update begins with a forward that was made before")))
    if before[-1].id in plan.in_pieces:
        return replace(plan, notes=(*plan.notes, PassNote("reuse", f"{before[-1].name} is in pieces, so {first.name} begins anew")))
    rows = first.options(UpdateOptions).minibatch
    ahead = {before[-1].id: float(rows) if rows is not None else math.inf}
    upto = f" of at most {rows} rows" if rows is not None else ""
    return replace(plan, ahead=ahead, notes=(*plan.notes, PassNote("reuse", f"{first.name} begins with {before[-1].name}{upto}")))
