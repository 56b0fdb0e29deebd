"""The pass ``share``: mark nodes that run a prompt shared by several rows through the model only once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlflow.compiler.graph.ancestry import expected_groups, expected_rows
from rlflow.compiler.graph.model import Graph, Op
from rlflow.compiler.plan import FORWARDS, PassNote, Plan


def share(plan: Plan, packing: Collection[str]) -> Plan:
    """Mark forward passes and updates that run a prompt shared by several rows through the model only once.

    If n rows share a prompt, this saves n - 1 passes over it. ``packing``: roles whose trainer does this.
    Trainers find common prompts themselves by comparing rows; the marks only tell where to expect them.
    """
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
    variants = {idle: share(variant, packing) for idle, variant in plan.variants.items()}
    note = PassNote("share", what or "no trainer has rows that share prompts")
    return replace(plan, prompt_rows=candidates, bodies=bodies, variants=variants, notes=(*plan.notes, note))


def _rows_of_a_prompt(graph: Graph) -> Mapping[int, int]:
    """Return how many rows share a prompt, for each axis with complete groups."""
    rows = expected_rows(graph, 1)
    return {axis: count // max(expected_groups(graph, axis, rows), 1) for axis, count in rows.items()}
