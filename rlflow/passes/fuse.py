"""Stages that follow one another on the ranks of a pool are asked for at once: each rank goes on with the rows that it has."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from rlflow.dispatch import DP_COMPUTE
from rlflow.graph.model import Node, Op
from rlflow.plan import Did, Plan

SECONDS = Node.timeout  # of a stage whose author says nothing: one with a deadline of its own is watched by itself


def fuse(plan: Plan) -> Plan:
    """Chains of stages of rows, on pools. Nothing else may wait for one but its last, and all that any of them reads from elsewhere must
    be there when the first begins, so that no node starts later for it. Which rows a rank has is then decided once."""
    chains: dict[int, tuple[int, ...]] = {}
    taken: set[int] = set()
    for i in plan.live if plan.placement else ():
        chain = [i]
        while (later := _next(plan, chain)) is not None:
            chain.append(later)
        if len(chain) > 1 and i not in taken:
            chains[i] = tuple(chain)
            taken |= set(chain)
    named = "; ".join(", ".join(plan.graph.nodes[i].name for i in chain) for chain in chains.values())
    said = f"one call for {named}" if named else "each stage is a call of its own"
    return replace(plan, chains=chains, did=(*plan.did, Did("fuse", said)))


def _next(plan: Plan, chain: list[int]) -> int | None:
    """What goes on with the chain, if anything does."""
    first, last = plan.graph.nodes[chain[0]], chain[-1]
    after = plan.followers[last]
    if len(after) != 1 or not _of_rows(plan, first):
        return None
    node = plan.graph.nodes[after[0]]
    there = nx.ancestors(plan.graph.order, first.id) | set(chain)
    alike = (node.axis, plan.home.get(node.id)) == (first.axis, plan.home.get(first.id))
    whole = node.rows == "row" or first.rows == "group"  # the first decides which rows lie together
    return node.id if _of_rows(plan, node) and alike and whole and plan.waits_for[node.id] <= there else None


def _of_rows(plan: Plan, node: Node) -> bool:
    """Whether each rank runs it on its share of the rows, and nothing else is asked of it."""
    plain = node.op is Op.STAGE and node.role is None and node.pure and node.dispatch == str(DP_COMPUTE)
    return plain and node.timeout == SECONDS and node.makes is None
