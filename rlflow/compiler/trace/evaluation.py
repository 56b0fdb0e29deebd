"""Trace a flow's own evaluation, ``@flow(evaluate=body)``, into a separate graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.author.columns import Kind
from rlflow.author.flow import Flow
from rlflow.author.schedule import ALWAYS
from rlflow.author.scope import entered
from rlflow.compiler.graph.model import Graph, Input, Node, Op, Output, RowAxis, without_unread_parts
from rlflow.compiler.trace import graph_rules
from rlflow.compiler.trace.arguments import arguments, raised, role_names
from rlflow.compiler.trace.symbols import RecordedGraph, SymbolicBatch, SymbolicRole
from rlflow.compiler.trace.tracer import Tracer
from rlflow.errors import FlowError, Problem, listed, nearest

# columns from the data that do not belong to a prompt
RESPONSES = ("tokens", "mask", "finish", "completion", "group", "chosen")
# columns that an evaluation returns: the first is averaged, the second is shown
READ = ("scores", "completion")
PREFIX = "evaluation."  # prefix of the names of the evaluation's nodes


def trace_evaluation(
    tracer: Tracer, flow: Flow, hp: Any, rewards: int, columns: Mapping[str, Kind | None]
) -> Graph | None:
    """Return the graph of a flow's own evaluation, or None if it has none or can't be traced.

    The body gets the data's columns except responses. All problems are reported to ``tracer``. ``rewards``:
    how many rewards are bound to ``*rewards``.
    """
    body = Flow(flow.evaluate) if callable(flow.evaluate) else None
    if body is None:
        tracer.report(_no_body(flow))
        return None
    try:
        tracer.report(*_parameter_problems(flow, body))
        if any(problem.code == "evaluate-parameters" for problem in tracer.problems):
            return None
        return _traced(
            tracer,
            flow,
            body,
            hp,
            rewards,
            {name: kind for name, kind in columns.items() if name not in RESPONSES},
        )
    except FlowError as error:
        tracer.report(*error.problems)
    except (Exception, SystemExit) as error:
        tracer.report(raised(body, error))
    return None


def _traced(
    tracer: Tracer, flow: Flow, body: Flow, hp: Any, rewards: int, columns: Mapping[str, Kind | None]
) -> Graph:
    bound = len(role_names(body, rewards).get(body.parameters.rest or "", []))
    positional, named = arguments(body, lambda name: SymbolicRole(tracer, name), hp, bound)
    with _separate_graph(tracer, columns) as prompts, entered(tracer):
        result = body.function(prompts, *positional, **named)
        if not isinstance(result, SymbolicBatch):
            raise FlowError(_no_batch(body, result))
        tracer.mine(result, "evaluate")
        every = tuple(Input(name, source.column) for name, source in result.sources.items())
        graph = Graph(
            body.name,
            tuple(tracer.recorded.nodes),
            tuple(tracer.recorded.axes),
            results=every,
            rows=result.axis,
        )
        tracer.report(
            *_evaluation_problems(graph, flow, body, set(tracer.state)),
            *graph_rules.never_read(graph, tracer.functions),
            *graph_rules.replaced_unread(graph, tracer.recorded.replaced),
        )
    return without_unread_parts(
        Graph(
            body.name,
            graph.nodes,
            graph.axes,
            results=tuple(item for item in every if item.parameter in READ),
            rows=graph.rows,
        )
    )


@contextlib.contextmanager
def _separate_graph(tracer: Tracer, columns: Mapping[str, Kind | None]) -> Iterator[SymbolicBatch]:
    """Record the calls in the ``with`` block into a separate graph, whose data are just prompts.

    The graph counts its calls from 0, so the random draws of an evaluation don't depend on the flow's own calls.
    """
    outer = tracer.recorded, tracer.state, tracer.calls
    tracer.recorded, tracer.calls, tracer.prefix, tracer.temperatures = RecordedGraph(), 0, PREFIX, False
    axis = tracer.axis(RowAxis())
    node = Node(
        0, Op.DATA, "prompts", axis, outputs=tuple(Output(name, kind, name) for name, kind in columns.items())
    )
    tracer.recorded.nodes.append(node)
    tracer.state = tracer.state_columns({name: source.kind for name, source in tracer.state.items()})
    try:
        yield tracer.symbols(node)
    finally:
        tracer.recorded, tracer.state, tracer.calls = outer
        tracer.prefix, tracer.temperatures = "", True


def _no_body(flow: Flow) -> Problem:
    return Problem(
        "evaluate-parameters",
        f"the evaluation of flow '{flow.name}' is not a function",
        flow.place,
        found=f"evaluate={flow.evaluate!r}",
        expected="a function of prompts and roles",
        remedy="write def evaluation(prompts, actor, reward): … above the flow, and @flow(evaluate=evaluation)",
    )


def _parameter_problems(flow: Flow, body: Flow) -> Iterator[Problem]:
    """Yield problems with the body's parameters.

    They must be the data, then roles that the flow has under the same names, then the settings.
    """
    known, own = flow.parameters, body.parameters
    wrong = [name for name in own.roles if name not in known.roles]
    wrong += [f"*{own.rest}"] if own.rest and own.rest != known.rest else []
    wrong += ["hp"] if own.hp is not None and type(own.hp) is not type(known.hp) else []
    names = [
        *known.roles,
        *([f"*{known.rest}"] if known.rest else []),
        *(["hp"] if known.hp is not None else []),
    ]
    for name in wrong:
        close = nearest(name, names)
        yield Problem(
            "evaluate-parameters",
            f"the evaluation '{body.name}' takes '{name}', but flow '{flow.name}' does not pass it",
            body.place,
            flow.place,
            found=name,
            expected=f"the data, then any of {listed(names)}",
            nearest=close,
            remedy=f"name the parameter '{close}'" if close else "use the names of the flow's roles, and hp",
        )


def _no_batch(body: Flow, value: object) -> Problem:
    return Problem(
        "evaluate-result",
        f"the evaluation '{body.name}' does not return a batch",
        body.place,
        found=type(value).__name__,
        expected="a batch with the row column scores",
        remedy="return the batch whose scores are averaged",
    )


def _evaluation_problems(graph: Graph, flow: Flow, body: Flow, state: set[str]) -> Iterator[Problem]:
    """Yield problems with an evaluation.

    It must return scores, mustn't update roles, and mustn't depend on anything but the weights, since
    otherwise different iterations couldn't be compared.
    """
    names = [item.parameter for item in graph.results]
    if "scores" not in names:
        yield Problem(
            "evaluate-scores",
            f"the evaluation '{body.name}' returns no 'scores'",
            body.place,
            flow.place,
            found=listed(names),
            expected="the row column scores",
            nearest=nearest("scores", names),
            remedy="score the rows that are returned: batch |= reward(batch)",
        )
    for node in graph.nodes:
        yield from _node_problems(graph, node, body, state)


def _node_problems(graph: Graph, node: Node, body: Flow, state: set[str]) -> Iterator[Problem]:
    """Yield problems with one call in an evaluation."""
    own = node.name.removeprefix(PREFIX)
    if node.writes:
        yield Problem(
            "evaluate-update",
            f"'{own}' changes weights inside an evaluation",
            node.place,
            body.place,
            found=own,
            expected="sampling, scoring and pure stages",
            remedy="update in the flow",
        )
    if node.schedule != ALWAYS:
        yield Problem(
            "evaluate-schedule",
            f"'{own}' has a schedule inside an evaluation, which does not belong to an iteration",
            node.place,
            body.place,
            found=str(node.schedule),
            expected="calls that are made in each evaluation",
            remedy="remove every= and after=",
        )
    if node.op is Op.REPEAT:
        yield Problem(
            "evaluate-repeat",
            f"'{own}' draws prompts of the training data inside an evaluation",
            node.place,
            body.place,
            found=own,
            expected="the held-out prompts that the evaluation gets",
            remedy="call the body of the repeat on the prompts",
        )
        return  # a `repeat` gets all state, whether it reads it or not
    read = [item.column.name for item in node.inputs if graph.nodes[item.column.node].op is Op.STATE]
    if names := [
        *read,
        *(output.name for output in node.outputs if output.name in state and node.op is not Op.STATE),
    ]:
        yield Problem(
            "evaluate-state",
            f"'{own}' depends on {listed(names)} inside an evaluation, which has another value each time",
            node.place,
            body.place,
            found=f"state {listed(names)}",
            expected="the same prompts, settings and random draws each time",
            remedy="use a setting of the flow, or a number",
        )
