"""Stages that one call runs one after another: what each of them reads, of others and of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.author.stage import Stage
from rlflow.execution.engine import Link
from rlflow.execution.store import Store
from rlflow.graph.model import Node
from rlflow.plan import Plan


def links_of(plan: Plan, store: Store, ids: Sequence[int]) -> list[Link]:
    """The stages of a chain, whose columns of others are there."""
    return [_link(plan, store, plan.graph.nodes[i], ids[:number]) for number, i in enumerate(ids)]


def _link(plan: Plan, store: Store, node: Node, before: Sequence[int]) -> Link:
    stage, inner = plan.program.functions[node.name], {}
    assert isinstance(stage, Stage)
    for item in node.inputs:
        if item.column.node in before:
            source = plan.graph.nodes[item.column.node].output(item.column.name).source
            inner[item.parameter] = (before.index(item.column.node), source)
    outer = store.gather(plan, replace(node, inputs=tuple(item for item in node.inputs if item.parameter not in inner)))
    return Link(node.name, stage, plan.program.settings[node.name], node.call, outer, inner)
