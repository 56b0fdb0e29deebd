"""Forwards and updates whose trainers compute a prompt once for all of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlflow.compiler.graph.ancestry import expected_groups, expected_rows
from rlflow.compiler.graph.model import Graph, Op
from rlflow.compiler.plan import FORWARDS, PassNote, Plan


def share(plan: Plan, packing: Collection[str]) -> Plan:
    """Where it pays: n rows of a prompt compute n - 1 prompts less, so with any rows of one prompt.
    ``packing``: the roles whose trainers can, and are not told otherwise. What rows have in common is found
    in the rows themselves; this says where to expect it."""
    each = _rows_of_a_prompt(plan.graph)
    candidates = {
        i: each[node.axis]
        for i in plan.live
        if (node := plan.graph.nodes[i]).role in packing
        and node.op in (*FORWARDS, Op.UPDATE)
        and each[node.axis] > 1
    }
    what = "; ".join(
        f"{plan.graph.nodes[i].name} computes a prompt once for {rows} rows" for i, rows in candidates.items()
    )
    bodies = {i: share(body, packing) for i, body in plan.bodies.items()}
    note = PassNote("share", what or "no trainer has rows whose prompts it could compute once")
    return replace(plan, prompt_rows=candidates, bodies=bodies, notes=(*plan.notes, note))


def _rows_of_a_prompt(graph: Graph) -> Mapping[int, int]:
    """Rows that begin with one prompt, by axis, where groups are whole."""
    rows = expected_rows(graph, 1)
    return {axis: count // max(expected_groups(graph, axis, rows), 1) for axis, count in rows.items()}
