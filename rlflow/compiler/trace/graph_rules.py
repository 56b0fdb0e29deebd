"""The rules that apply to a whole graph, with the problem for each violation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlflow.author.loss import Loss
from rlflow.author.node_options import EncodeOptions, GenerateOptions
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import Column, Graph, Node, Op, all_nodes, used_nodes
from rlflow.compiler.trace import environment_rules, followed, memory_rules
from rlflow.compiler.trace.drawn_by import DrawnBy, possible
from rlflow.errors import Place, Problem, listed, nearest

if TYPE_CHECKING:
    from rlflow.compiler.trace.tracer import Tracer


def graph_problems(
    graph: Graph, tracer: Tracer, place: Place | None, drawn: DrawnBy | None, trains: bool = True
) -> Iterator[Problem]:
    """Yield problems that only show in the whole graph.

    ``drawn``: the weights by which the run draws prompts, if any. ``trains``: whether the flow must update a
    role.
    """
    yield from replaced_unread(graph, tracer.recorded.replaced)
    yield from never_read(graph, tracer.functions, drawn)
    calls = [node.name for node in all_nodes(graph.nodes) if node.op is Op.GENERATE]
    evaluating = [
        f"{node.role}.generate"
        for node in (graph.evaluation.nodes if graph.evaluation else ())
        if node.op is Op.GENERATE
    ]
    yield from environment_rules.environment_roles(graph, tracer.context.environments, used_nodes(graph))
    yield from memory_rules.unused(graph, place, drawn.table if drawn else None)
    yield from memory_rules.buffer_problems(graph)
    yield from no_such_call(tracer.context.sampling, list(dict.fromkeys([*calls, *evaluating])))
    if trains and not any(node.writes for node in graph.nodes):
        yield Problem(
            "nothing-updated",
            f"flow '{graph.name}' does not update any role",
            place,
            found="no update of any role",
            expected="at least one",
            remedy="end with actor.update(batch, loss, …)",
        )
    yield from _only_encoded(graph)
    yield from _heads(graph, tracer.functions)
    yield from followed.head_problems(graph)
    yield from _truncated(graph, tracer.functions)
    for use in graph.roles:
        if not any(node.role == use.name for node in used_nodes(graph)):
            yield Problem(
                "role-unused",
                f"role '{use.name}' is not used at these settings, so it is not loaded",
                place,
                found="no method call",
                expected="a method call, or none",
                remedy="nothing, if this is intended",
                severity="note",
            )


def _only_encoded(graph: Graph) -> Iterator[Problem]:
    """Yield a problem for each role that `encode` gets, but that the flow doesn't use, so it has no model."""
    used = {node.role for node in used_nodes(graph)}
    for node in used_nodes(graph):
        if isinstance(node.settings, EncodeOptions) and not used & {*node.settings.roles}:
            yield Problem(
                "encode-role",
                f"'{node.name}' encodes for the role '{node.settings.roles[0]}', which the flow does not use",
                node.place,
                found=f"no method call of {node.settings.roles[0]}",
                expected="the role that is trained on the rows",
                remedy="pass the role whose update reads the rows",
            )


def _heads(graph: Graph, functions: Mapping[str, Stage | Loss]) -> Iterator[Problem]:
    """Yield a problem for each role that needs more than one head."""
    for use in graph.roles:
        heads: dict[str, Node] = {}
        for node in used_nodes(graph):
            loss = functions.get(node.name)
            head = {Op.LOGPROBS: "logprobs", Op.GENERATE: "logprobs", Op.VALUES: "values"}.get(node.op)
            if node.op is Op.UPDATE and isinstance(loss, Loss):
                head = loss.head
            if node.role == use.name and head:
                heads.setdefault(head, node)
        if len(heads) > 1:
            last = list(heads.values())[-1]
            yield Problem(
                "two-heads",
                f"role '{use.name}' is used with {len(heads)} heads",
                last.place,
                found=listed(heads),
                expected="one of logprobs, values, scores",
                remedy="use two roles",
            )


def _truncated(graph: Graph, functions: Mapping[str, Stage | Loss]) -> Iterator[Problem]:
    """Yield a problem for each ratio of truncated to full log-probs, since it is biased.

    Log-probs are truncated if top-p, top-k, min_tokens or lengths keep tokens from being sampled.
    """
    every = [node for node in all_nodes(graph.nodes) if node.op is Op.GENERATE]
    for part in (graph, *(node.body for node in all_nodes(graph.nodes) if node.body is not None)):
        for node in part.nodes:
            givers = {item.parameter: part.nodes[item.column.node] for item in node.inputs}
            loss = functions.get(node.name)
            if "sampled_logprobs" not in givers or not (
                "logprobs" in givers or (isinstance(loss, Loss) and "logprobs" in loss.new)
            ):
                continue
            # otherwise the rows were joined or come from a `repeat`
            direct = givers["sampled_logprobs"].op is Op.GENERATE
            cut = next(
                (one for one in ([givers["sampled_logprobs"]] if direct else every) if _truncates(one)), None
            )
            if cut is not None:
                yield _biased(node, cut)


def _biased(node: Node, cut: Node) -> Problem:
    """Return the problem of a node that uses a ratio of full log-probs to ones truncated by ``cut``.

    ``cut``: a `generate` call.
    """
    return Problem(
        "truncated-ratio",
        f"'{node.name}' compares log-probs with sampled log-probs that {_truncates(cut)} renormalised",
        node.place,
        found=f"sampled_logprobs truncated by '{cut.name}' at {cut.place}, logprobs not truncated",
        expected="top_p=1, top_k=0, min_tokens=0 and no lengths if both are in a ratio",
        remedy="sample without truncation",
        severity="warning",
    )


def _truncates(node: Node) -> str:
    """Name the settings of a `generate` call that keep tokens from being sampled, or return ""."""
    settings = node.options(GenerateOptions)
    return ", ".join(
        name
        for name, off in (("top_p", 1), ("top_k", 0), ("min_tokens", 0), ("lengths", ()))
        if getattr(settings, name) != off
    )


def replaced_unread(graph: Graph, replaced: Iterable[tuple[Column, Place | None]]) -> Iterator[Problem]:
    """Yield a problem for each column that another of the same name replaced before anything read it."""
    read = graph.readers().keys() | {item.column for item in graph.results}
    for column, place in replaced:
        giver = graph.nodes[column.node]
        if column not in read and not _read_within(giver, column.name):
            yield Problem(
                "replaced-unread",
                f"column '{column.name}' of '{giver.name}' is replaced before anything reads it",
                place,
                giver.place,
                found=f"a second '{column.name}'",
                expected="a reader between the two, or only one of them",
                remedy=f'rename one of them: gives="…", or drop("{column.name}")',
            )


def _read_within(node: Node, name: str) -> bool:
    """Return True if the column comes from the data or a table, or is read inside its `repeat`."""
    if node.body is None:
        return node.op in (Op.DATA, Op.READ, Op.DRAW)
    inner = next(item.column for item in node.body.results if item.parameter == name)
    return inner in node.body.readers() or _read_within(node.body.nodes[inner.node], inner.name)


def never_read(
    graph: Graph, own: Mapping[str, Stage | Loss], drawn: DrawnBy | None = None
) -> Iterator[Problem]:
    """Yield a problem for each column that nothing reads, if one of the author's own stages computes it.

    ``drawn``: the weights by which the run draws prompts, if any.
    """
    readers = graph.readers()
    results = {item.column for item in graph.results}
    for node in graph.nodes:
        columns = [Column(node.id, output.name) for output in node.outputs]
        unread = [c.name for c in columns if c not in readers and c not in results]
        unread = [name for name in unread if name not in {slot.name for slot in graph.state}]
        if drawn is not None and drawn.stage == node:
            unread = [name for name in unread if name != drawn.name]
        if node.op is Op.STAGE and node.name in own and unread:
            weights = possible(graph, node, own[node.name])
            draw = f", or draw prompts by it: --prompts-by {weights[0]}" if weights else ""
            yield Problem(
                "never-read",
                f"stage '{node.name}' gives {listed(unread)}, but nothing reads it",
                node.place,
                node.definition,
                found=listed(unread),
                expected="a later stage, loss or method that reads it",
                remedy=f"remove it, or read it{draw}",
                severity="warning",
            )


def no_such_call(sampling: Iterable[str], calls: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each call that the run has sampling settings for but the flow doesn't make.

    ``sampling``: the calls that there are settings for. ``calls``: the flow's `generate` calls.
    """
    for call in sampling:
        if call not in calls:
            yield Problem(
                "no-such-generate",
                f"--{call}.… is for a call that the flow does not make at these settings",
                found=call,
                expected=f"one of {listed(calls)}",
                nearest=nearest(call, calls),
                remedy="name one of them, or remove the flag",
            )
