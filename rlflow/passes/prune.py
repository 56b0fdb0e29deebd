"""Keep the columns that a later node or the run's records read; drop nodes that nothing needs."""

from __future__ import annotations

from dataclasses import replace

from rlflow.columns import SOURCE
from rlflow.graph.model import Column, Graph, Input, Node, Op
from rlflow.plan import FORWARDS, PassNote, Plan

RECORDED = (SOURCE, "prompt", "answer", "completion", "finish", "scores", "tokens", "mask")
WATCHED = ("logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")  # recorded where something reads them anyway


def prune(plan: Plan) -> Plan:
    """Dead columns go, and forwards of models that nobody reads. Samples and state are readers, and so are metrics: a stage of the
    author's own may end with some, which only running it tells."""
    graph = plan.graph
    results = {item.column for item in graph.results} if plan.held_to_end else set()
    recorded = frozenset(_last(graph, RECORDED) | results | {slot.final for slot in graph.state})
    live: set[int] = set()
    needed = set(recorded)
    for node in reversed(graph.nodes):
        outputs = {Column(node.id, output.name) for output in node.outputs}
        if outputs & needed or node.op not in FORWARDS:
            live.add(node.id)
            needed |= {item.column for item in node.inputs if node.op is not Op.CONCAT or _joins(node, item, needed)}
    total = sum(len(node.outputs) for node in graph.nodes)
    columns = frozenset(c for c in needed if any(o.name == c.name for o in graph.nodes[c.node].outputs))
    dead = [node.name for node in graph.nodes if node.id not in live]
    what = f"{len(columns)} of {total} columns are read" + (f"; dropped {', '.join(dead)}" if dead else "")
    order = tuple(sorted(live))
    recorded |= _last(graph, WATCHED) & columns
    return replace(plan, live=order, kept=columns, held_to_end=recorded, did=(*plan.did, PassNote("prune", what)))


def _joins(node: Node, item: Input, needed: set[Column]) -> bool:
    """Whether the joined column that an input becomes a part of is read."""
    return Column(node.id, item.parameter.partition(".")[2]) in needed


def _last(graph: Graph, names: tuple[str, ...]) -> set[Column]:
    """The last column of each name, which samples and default metrics show."""
    last: dict[str, Column] = {}
    for node in graph.nodes:
        last |= {output.name: Column(node.id, output.name) for output in node.outputs if output.name in names}
    return set(last.values())
