"""Roles that follow another: their nodes at the end of a graph, and the problems with how they are declared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from rlflow.author.columns import Level
from rlflow.author.memory import Follow
from rlflow.author.methods import DEADLINES
from rlflow.author.node_options import FollowOptions
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, all_nodes
from rlflow.compiler.trace.graph_recorder import GraphRecorder
from rlflow.errors import Place, Problem, listed, nearest

WHEN = "when"  # the input that decides whether the weights move


def add_follows(
    tracer: GraphRecorder, declared: Mapping[str, Follow], evaluation: Graph | None, place: Place | None
) -> None:
    """Append a node for each followed role that the flow or its evaluation uses, and report problems.

    A role that isn't used at these settings isn't loaded, so it doesn't follow either. ``place``: the flow.
    """
    nodes = list(all_nodes(tuple(tracer.recorded.nodes)))
    updated = {node.role for node in nodes if node.op is Op.UPDATE and node.role}
    used = {node.role for node in (*nodes, *(evaluation.nodes if evaluation else ()))}
    for name, spec in declared.items():
        problems = list(_role_problems(name, spec, declared, updated, tracer.context.roles, place))
        inputs: tuple[Input, ...] = ()
        if spec.when is not None:
            giver = _giver(tracer, spec.when)
            problems += _when_problems(name, spec.when, giver, tracer.state, place)
            inputs = (Input(WHEN, Column(giver.id, spec.when)),) if giver is not None else ()
        tracer.report(*problems)
        if name in used and not problems:
            tracer.add(
                Op.FOLLOW,
                f"{name}.follow",
                0,
                inputs=inputs,
                settings=FollowOptions(spec.role, spec.mix),
                role=name,
                timeout=DEADLINES["update"],
                schedule=spec.schedule,
                place=place,
            )


def _giver(tracer: GraphRecorder, name: str) -> Node | None:
    """Return the last node that gives the column ``name``, which may be a state."""
    return next(
        (
            node
            for node in reversed(tracer.recorded.nodes)
            if any(output.name == name for output in node.outputs)
        ),
        None,
    )


def _role_problems(
    name: str,
    spec: Follow,
    declared: Mapping[str, Follow],
    updated: Collection[str],
    roles: Collection[str],
    place: Place | None,
) -> Iterator[Problem]:
    """Yield the problem of a role that can't follow the role that its declaration names."""
    found = f'"{name}": follow("{spec.role}", …)'
    if name in updated:
        yield Problem(
            "follow-updated",
            f"role '{name}' follows '{spec.role}', but the flow updates it too",
            place,
            found=f"{name}.update",
            expected="a role whose weights only follow another's",
            remedy=f"remove {name}.update, or take {name} out of keeps",
        )
    if spec.role in declared:
        circle = spec.role == name or declared[spec.role].role == name
        yield Problem(
            "follow-role",
            f"role '{name}' follows '{spec.role}', which "
            + ("follows it in turn" if circle else "follows another role itself"),
            place,
            found=found,
            expected="a role that the flow updates",
            remedy="follow the role at the end of the chain"
            if not circle
            else "follow a role that the flow updates",
        )
    elif spec.role not in updated:
        close = nearest(spec.role, updated)
        yield Problem(
            "follow-role",
            f"role '{name}' follows '{spec.role}', which the flow does not update"
            if spec.role in roles
            else f"role '{name}' follows '{spec.role}', but the flow has no such role",
            place,
            found=found,
            expected=f"one of {listed(sorted(updated))}" if updated else "a role that the flow updates",
            nearest=close,
            remedy="name a role that the flow updates",
        )


def _when_problems(
    name: str, when: str, giver: Node | None, states: Collection[str], place: Place | None
) -> Iterator[Problem]:
    """Yield the problem of a column that can't decide when a role moves.

    ``giver``: the node that gives it. ``states``: names of the flow's states, which are numbers: 0 is False.
    """
    kind = giver.output(when).kind if giver is not None else None
    scalar = giver is not None and kind is not None and kind.level is Level.SCALAR and giver.dispatch != "ALL"
    if not scalar or kind is None or not (kind.family == "bool" or when in states):
        yield Problem(
            "follow-when",
            f"role '{name}' follows when '{when}' is True, but '{when}' is not a bool scalar",
            place,
            giver.place if giver is not None else None,
            found="no such column or state" if giver is None else f"{giver.name} gives {kind or 'it'}",
            expected="a state of the flow, or a bool scalar of a stage with dispatch=RANK0",
            remedy=f'write @stage(gives={{"{when}": scalar(torch.bool)}}, dispatch=RANK0), and call it outside '
            "of a repeat",
        )


def head_problems(graph: Graph) -> Iterator[Problem]:
    """Yield a problem for each role that follows a role with another head."""
    heads = {use.name: use.head for use in graph.roles}
    for node in graph.nodes:
        if isinstance(node.settings, FollowOptions) and node.role is not None:
            own, other = heads[node.role], heads[node.settings.follows]
            if own != other:
                yield Problem(
                    "follow-head",
                    f"role '{node.role}' is used with {own}, but '{node.settings.follows}', which it follows, "
                    f"with {other}",
                    node.place,
                    found=f"heads {own} and {other}",
                    expected="two models with the same head",
                    remedy=f"follow a role that is used with {own}",
                )
