"""The rules for schedules (`every=`, `after=`): what a call reads must be there whenever the call is due.

Each distinct set of due nodes is judged. A call's problem is reported once, with the iterations of all sets
that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rlflow.author.loss import Loss
from rlflow.author.schedule import ALWAYS, CallSchedule
from rlflow.author.stage import Stage
from rlflow.compiler.graph.due import Idle, Narrowed, due_sets, idle_in, narrowed, schedules
from rlflow.compiler.graph.model import FRESH_OPTIMIZER, Graph, Node, all_nodes
from rlflow.errors import PlanError, Problem, listed

Functions = Mapping[str, Stage | Loss]  # node → its stage or loss
TOLD, SEARCHED = 3, 10_000  # iterations that a message names, and iterations in which they are looked for


@dataclass(frozen=True)
class Lacked:
    """Something that a due node needs and an idle one would have made."""

    reader: str  # name of the due node
    columns: tuple[str, ...]  # columns that are None; (): the rows aren't there
    giver: str  # name of the node whose schedule is the reason


def due_problems(graph: Graph, functions: Functions) -> Iterator[Problem]:
    """Yield a problem for each call that needs something which isn't there in some iteration.

    If there are too many sets of due nodes to judge, this yields nothing, because planning the flow fails.
    """
    scheduled, found = schedules(graph), dict[Lacked, set[Idle]]()
    if not scheduled:
        return
    try:
        sets = due_sets(graph)
    except PlanError:
        return
    for each in sets:
        for lacked in _lacked(narrowed(graph, each.idle), functions):
            found.setdefault(lacked, set()).add(each.idle)
    nodes = {node.name: node for node in all_nodes(graph.nodes)}
    for lacked, where in found.items():
        yield _problem(lacked, nodes, functions, _told(scheduled, where))


def _lacked(part: Narrowed, functions: Functions) -> Iterator[Lacked]:
    for node in part.graph.nodes:
        if node.id in part.idle:
            continue
        if part.without_rows(node):
            yield Lacked(node.name, (), _cause(part, node).name)
        elif columns := _required(node, part, functions):
            yield Lacked(node.name, columns, _cause(part, node).name)
        if node.id in part.bodies:
            yield from _of_body(node, part.bodies[node.id], functions)


def _required(node: Node, part: Narrowed, functions: Functions) -> tuple[str, ...]:
    """Return the names of the columns that a due node needs but are None."""
    function = functions.get(node.name)
    optional = {FRESH_OPTIMIZER}
    if function is not None:
        optional |= {column.name for column in function.signature.columns if column.optional}
    return tuple(item.column.name for item in part.lacking.get(node.id, ()) if item.parameter not in optional)


def _of_body(node: Node, body: Narrowed, functions: Functions) -> Iterator[Lacked]:
    """Yield what the nodes in a `repeat`'s body lack, and what the `repeat` lacks of its body."""
    yield from _lacked(body, functions)
    if body.graph.rows in body.no_rows:
        yield Lacked(node.name, (), _root(body, body.graph.makers[body.graph.rows]).name)
        return
    for item in body.missing_results:
        if item.parameter == "keep":
            yield Lacked(node.name, ("keep",), _root(body, item.column.node).name)


def _cause(part: Narrowed, node: Node) -> Node:
    """Return the node whose schedule is the reason why a due node lacks something."""
    if part.without_rows(node):
        axis = next(axis for axis in part.graph.works_on(node) if axis in part.no_rows)
        return _root(part, part.graph.makers[axis])
    return _root(part, part.lacking[node.id][0].column.node)


def _root(part: Narrowed, number: int) -> Node:
    """Return the scheduled node because of which the node ``number`` is idle, or lacks a column."""
    node = part.idle.get(number, part.graph.nodes[number])
    if node.schedule != ALWAYS:
        return node
    makers = [part.graph.makers[axis] for axis in part.graph.works_on(node) if axis in part.no_rows]
    givers = [item.column.node for item in node.inputs if item.column in part.gone]
    before = [each for each in (*makers, *givers) if each < number]
    return _root(part, before[0]) if before else node


def _told(scheduled: Mapping[str, CallSchedule], sets: Collection[Idle]) -> str:
    """Name the first iterations in which the same nodes are idle as in one of the sets."""
    numbers = (i for i in range(SEARCHED) if idle_in(scheduled, i) in sets)
    first = [str(number) for number, _ in zip(numbers, range(TOLD + 1), strict=False)]
    some = ", ".join(first[:TOLD]) + ", …" * (len(first) > TOLD)
    return f"iteration{'s' * (len(first) > 1)} {some}" if first else "some iterations"


def _problem(lacked: Lacked, nodes: Mapping[str, Node], functions: Functions, when: str) -> Problem:
    reader, giver = nodes[lacked.reader], nodes[lacked.giver]
    same = f"give '{reader.name}' the same every= and after=, or '{giver.name}' none"
    found = f"'{giver.name}' is only due with {giver.schedule}"
    if not lacked.columns:
        return Problem(
            "rows-not-due",
            f"'{reader.name}' works on rows that nothing makes in {when}, counted from 0",
            reader.place,
            giver.place,
            found=found,
            expected="rows in each iteration in which the call is due",
            remedy=same,
        )
    names = listed(lacked.columns)
    function = functions.get(reader.name)
    own = function is not None and lacked.columns[0] in function.signature.column_names
    optional = f", or make it optional in its function: {lacked.columns[0]}=None" if own else ""
    return Problem(
        "column-not-due",
        f"'{reader.name}' reads {names}, which is None in {when}, counted from 0",
        reader.place,
        reader.definition,
        found=found,
        expected="a column that is there in each iteration in which the call is due",
        remedy=same + optional,
    )
