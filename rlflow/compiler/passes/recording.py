"""Choose the columns that a run records for samples and health metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from rlflow.author.columns import SOURCE
from rlflow.compiler.graph.ancestry import chosen_from, sources
from rlflow.compiler.graph.model import Column, Graph, Node, Op
from rlflow.compiler.plan import ScoredColumns

RECORDED = (
    SOURCE,
    "prompt",
    "answer",
    "completion",
    "finish",
    "scores",
    "tokens",
    "mask",
    "turns",
    "failed",
    "episode",
)
VERSION = "policy_version"  # recorded only for rows of which some were encoded from text
# these columns are recorded only if a node reads them
WATCHED = ("logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")
# columns for the health metrics of one role
OF_A_POLICY = (SOURCE, "finish", "scores", "tokens", "mask", *WATCHED)
# only the role's own values: those that a different role gives for the same rows do not count
OWN = ("logprobs", "entropy")
NOTHING: Mapping[int, Node] = MappingProxyType({})


def _updates(graph: Graph, idle: Mapping[int, Node]) -> list[Node]:
    """Return the updates of the trained roles that sample, in program order.

    ``idle``: the nodes of the graph that aren't due, which count too. So all iterations measure the same rows.
    """
    sampling = {use.name for use in graph.roles if use.trained and use.generates}
    nodes = [idle.get(node.id, node) for node in graph.nodes]
    return [node for node in nodes if node.op is Op.UPDATE and node.role in sampling]


def scored_columns(
    graph: Graph, policies: Iterable[str], idle: Mapping[int, Node] = NOTHING
) -> dict[str, ScoredColumns]:
    """For each role, return the scores of the rows that its first update learns from.

    ``policies``: the roles to measure separately. If there are none, the result has a single key "", for the
    first update of a role that samples. Roles without rewards are left out. ``idle``: the nodes of the graph
    that aren't due.
    """
    updates = _updates(graph, idle)
    first = {role: next(node for node in updates if node.role == role) for role in policies} or dict(
        zip([""], updates, strict=False)
    )
    every = {role: _scored_columns(graph, update) for role, update in first.items()}
    return {role: columns for role, columns in every.items() if tuple(columns)}


def _scored_columns(graph: Graph, update: Node) -> ScoredColumns:
    axes, before = set(chosen_from(graph.axes, update.axis)), graph.nodes[: update.id]
    rewards = dict(given for node in before if node.rows_axis in axes for given in _scores(node))
    scores = [
        node
        for node in before
        if node.rows_axis in axes and any(output.name == "scores" for output in node.outputs)
    ]
    if len(rewards) < 2 or (scores and scores[-1].op is Op.STAGE):  # a stage has combined the scores
        rewards = {}
    reached = _reached(before)
    read = (item.column for item in update.inputs if graph.nodes[item.column.node].rows_axis in axes)
    return ScoredColumns(rewards, tuple(dict.fromkeys(column for column in read if column in reached)))


def _scores(node: Node) -> Iterator[tuple[str, Column]]:
    """Yield (reward role, column of its scores) for a reward call, or for a `repeat` that returns scores."""
    if node.op is Op.REWARD:
        yield node.role or "", Column(node.id, node.outputs[0].name)
    if node.body is not None:
        inner = {column: role for each in node.body.nodes for role, column in _scores(each)}
        yield from (
            (inner[item.column], Column(node.id, item.parameter))
            for item in node.body.results
            if item.column in inner
        )


def _reached(nodes: Iterable[Node]) -> set[Column]:
    """Return the columns that rewards return, and all columns computed from them."""
    reached: set[Column] = set()
    for node in nodes:
        if node.body is not None:
            inner = _reached(node.body.nodes)
            reached |= {Column(node.id, item.parameter) for item in node.body.results if item.column in inner}
        elif node.op is Op.CONCAT:
            reached |= {
                Column(node.id, item.parameter.partition(".")[2])
                for item in node.inputs
                if item.column in reached
            }
        elif node.op is Op.REWARD or (
            node.op is Op.STAGE and any(item.column in reached for item in node.inputs)
        ):
            reached |= {Column(node.id, output.name) for output in node.outputs}
    return reached


def last(graph: Graph) -> dict[str, Column]:
    """Return the last column of each name that samples and health metrics show.

    Columns of encoded responses, which no model sampled, are shown only if there are no others.
    """
    columns: dict[str, Column] = {}
    for node in graph.nodes:
        own = {
            output.name: Column(node.id, output.name)
            for output in node.outputs
            if output.name in (*RECORDED, *WATCHED)
        }
        columns = own | columns if node.op is Op.ENCODE else columns | own
    return columns | _versions(graph, columns)


def _versions(graph: Graph, columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the column ``policy_version`` if recorded rows may have tokens that no model sampled.

    Health metrics of the policy skip these tokens.
    """
    mask = columns.get("mask")
    if mask is None:
        return {}
    giver = graph.nodes[mask.node]
    encoded = any(graph.axes[axis].step == "encoded" for axis in sources(graph.axes, giver.rows_axis))
    known = any(output.name == VERSION for output in giver.outputs)
    return {VERSION: Column(giver.id, VERSION)} if encoded and known else {}


def of_policies(graph: Graph, idle: Mapping[int, Node] = NOTHING) -> dict[str, dict[str, Column]]:
    """Return the columns of the rows that each role's first update learns from: role → name → column.

    Only trained roles that sample are included. If there is just one, the result is empty. ``idle``: the
    nodes of the graph that aren't due.
    """
    updates: dict[str, Node] = {}
    for node in _updates(graph, idle):
        updates.setdefault(node.role or "", node)
    return (
        {role: _learned_from(graph, update) for role, update in updates.items()} if len(updates) > 1 else {}
    )


def _learned_from(graph: Graph, update: Node) -> dict[str, Column]:
    """Return the last column of each name for the update's rows, or for rows that these were chosen from."""
    axes = set(chosen_from(graph.axes, update.axis))
    columns: Mapping[str, Column] = {}
    for node in graph.nodes[: update.id]:
        names = [output.name for output in node.outputs if output.name in OF_A_POLICY]
        names = [name for name in names if name not in OWN or node.role in (None, update.role)]
        if node.rows_axis in axes or SOURCE in names:
            columns = {**columns, **{name: Column(node.id, name) for name in names}}
    return {**columns, **_versions(graph, columns)}
