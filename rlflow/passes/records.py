"""Which columns a run's samples and health metrics are taken from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlflow.columns import SOURCE
from rlflow.graph.lineage import line
from rlflow.graph.model import Column, Graph, Node, Op

RECORDED = (SOURCE, "prompt", "answer", "completion", "finish", "scores", "tokens", "mask", "turns", "failed", "episode")
WATCHED = ("logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")  # recorded where something reads them anyway
OF_A_POLICY = (SOURCE, "finish", "scores", "tokens", "mask", *WATCHED)  # what the health of one role is measured by
OWN = ("logprobs", "entropy")  # of the role alone: another role's numbers of the same rows are not its own


def last(graph: Graph) -> dict[str, Column]:
    """The last column of each name that samples and health metrics show."""
    columns: dict[str, Column] = {}
    for node in graph.nodes:
        columns |= {output.name: Column(node.id, output.name) for output in node.outputs if output.name in (*RECORDED, *WATCHED)}
    return columns


def of_policies(graph: Graph) -> dict[str, dict[str, Column]]:
    """Role → column by name, of the rows that its first update learns from, for each trained role that samples; empty where there are not
    several."""
    policies = {use.name for use in graph.roles if use.trained and use.generates}
    updates: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op is Op.UPDATE and node.role in policies:
            updates.setdefault(node.role or "", node)
    return {role: _learned_from(graph, update) for role, update in updates.items()} if len(updates) > 1 else {}


def _learned_from(graph: Graph, update: Node) -> dict[str, Column]:
    """The last column of each name over the rows of an update, or over those that they were chosen from."""
    axes = set(_chosen_from(graph, update.axis))
    columns: Mapping[str, Column] = {}
    for node in graph.nodes[: update.id]:
        names = [output.name for output in node.outputs if output.name in OF_A_POLICY]
        names = [name for name in names if name not in OWN or node.role in (None, update.role)]
        if node.rows_axis in axes or SOURCE in names:
            columns = {**columns, **{name: Column(node.id, name) for name in names}}
    return dict(columns)


def _chosen_from(graph: Graph, axis: int) -> Iterable[int]:
    """The axis, and those of which its rows are some."""
    for step in line(graph.axes, axis):
        yield step
        if graph.axes[step].step != "chosen":
            return
