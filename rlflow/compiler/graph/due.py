"""Which nodes of a graph are due in an iteration, and the graph of the iterations in which only these are.

A flow has one graph. If a call has a schedule (`every=`, `after=`), its node is idle in some iterations, and
its columns are None there. `ask`, `encode`, `choose`, `concat` and the calls of tables and buffers have no
schedule: they are idle if the rows or the columns that they need aren't there. A state keeps its value if the
stage that sets it is idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rlflow.author.schedule import ALWAYS, CallSchedule
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, all_nodes
from rlflow.errors import PlanError, listed

MOST_SETS = 64  # sets of due nodes that are planned and checked
MOST_ITERATIONS = 100_000  # iterations of a cycle in which some scheduled node is due
# kinds of nodes that are due wherever they have what they need
FOLLOWING = (Op.ASK, Op.ENCODE, Op.CHOOSE, Op.CONCAT, Op.READ, Op.WRITE, Op.PUT, Op.FOLLOW)

Idle = frozenset[str]  # names of the nodes that are not due


@dataclass(frozen=True)
class DueSet:
    """A set of iterations in which the same nodes are due.

    ``share``: the fraction of a cycle's iterations that are in this set. It is 0 if all of them are before
    the cycles, while some node waits for its first iteration.
    """

    idle: Idle
    first: int  # the first iteration of the set
    share: float


def schedules(graph: Graph) -> dict[str, CallSchedule]:
    """Return the schedule of each node that isn't due in every iteration, by name, including bodies."""
    return {node.name: node.schedule for node in all_nodes(graph.nodes) if node.schedule != ALWAYS}


def idle_in(scheduled: Mapping[str, CallSchedule], iteration: int) -> Idle:
    """Return the names of the scheduled nodes that aren't due in an iteration."""
    return frozenset(name for name, schedule in scheduled.items() if not schedule.due(iteration))


def due_sets(graph: Graph) -> tuple[DueSet, ...]:
    """Return all sets of nodes that are due in the same iterations, in the order of their first iterations.

    Without schedules there is one set, in which nothing is idle. Raises PlanError if there are more than
    MOST_SETS sets, or if the schedules only meet again after too many iterations.
    """
    scheduled = schedules(graph)
    start = max((schedule.after for schedule in scheduled.values()), default=0)
    cycle = math.lcm(*(schedule.every for schedule in scheduled.values()))
    first: dict[Idle, int] = {}
    counts: Counter[Idle] = Counter()
    for number, many in _distinct(scheduled, start, start + cycle):
        idle = idle_in(scheduled, number)
        first[idle] = min(number, first.get(idle, number))
        counts[idle] += many * (number >= start)
        if len(first) > MOST_SETS:
            raise _too_many(scheduled, f"more than {MOST_SETS} of them")
    sets = (DueSet(idle, number, counts[idle] / cycle) for idle, number in first.items())
    return tuple(sorted(sets, key=lambda each: each.first))


def _distinct(scheduled: Mapping[str, CallSchedule], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (iteration, number of iterations like it) so that all iterations before ``end`` are counted.

    Iterations are alike if no periodic call is due in them, and if they are on the same side of ``start`` and
    of the first iteration of all other calls.
    """
    distinct = set(scheduled.values())
    periodic = [schedule for schedule in distinct if schedule.every > 1]
    if sum(schedule.count(end) for schedule in periodic) > MOST_ITERATIONS:
        raise _too_many(scheduled, f"a cycle of {end - start} iterations")
    due = {i for schedule in periodic for i in range(schedule.after, end, schedule.every)}
    breaks = sorted({0, start, end} | {schedule.after for schedule in distinct if schedule.every == 1})
    for low, high in pairwise(breaks):
        quiet = next((i for i in range(low, high) if i not in due), None)
        if quiet is not None:
            yield quiet, high - low - sum(low <= i < high for i in due)
    yield from ((i, 1) for i in sorted(due))


def _too_many(scheduled: Mapping[str, CallSchedule], found: str) -> PlanError:
    return PlanError.of(
        "due-sets",
        "the schedules of the flow's calls give too many different sets of calls that are due together",
        found=f"{found}, from {listed(f'{name}: {schedule}' for name, schedule in scheduled.items())}",
        expected=f"at most {MOST_SETS} different sets, and a cycle that repeats",
        remedy="give several calls the same every= and after=, or numbers that are multiples of each other",
    )


@dataclass
class Narrowed:
    """A graph in which some nodes are idle, and what the others lack.

    ``gone``: columns that are None. ``no_rows``: axes without rows. ``lacking``: for each node that is due,
    the inputs that it can't read. ``missing_results``: results of the graph that are None.
    """

    graph: Graph
    idle: dict[int, Node] = field(default_factory=dict)  # idle nodes as they are when due, by id
    gone: set[Column] = field(default_factory=set)
    no_rows: set[int] = field(default_factory=set)
    lacking: dict[int, tuple[Input, ...]] = field(default_factory=dict)
    bodies: dict[int, Narrowed] = field(default_factory=dict)  # repeat → its body
    missing_results: tuple[Input, ...] = ()

    def without_rows(self, node: Node) -> bool:
        """Return True if a node works on rows that nothing makes in these iterations."""
        return not self.no_rows.isdisjoint(self.graph.works_on(node))


def narrowed(graph: Graph, idle: Collection[str]) -> Narrowed:
    """Return the graph of the iterations in which the nodes with the names ``idle`` aren't due.

    Nodes keep their ids. An idle node becomes an ``Op.IDLE`` node without inputs and outputs, and other nodes
    lose the inputs that it would have given.
    """
    result, names = Narrowed(graph), {slot.name for slot in graph.state}
    latest: dict[str, Column] = {}  # state → the column with its value at this point of the program
    moved: dict[Column, Column] = {}  # column of a state that isn't set → the column with its value
    nodes: list[Node] = []
    for node in graph.nodes:
        read = [replace(item, column=moved.get(item.column, item.column)) for item in node.inputs]
        missing = tuple(item for item in read if item.column in result.gone)
        waits = node.op in FOLLOWING and (
            result.without_rows(node) or (bool(missing) and node.op is not Op.CONCAT)
        )
        if node.name in idle or waits:
            _set_idle(node, result, names & latest.keys(), latest, moved)
            nodes.append(_inert(node))
            continue
        if missing and node.op is not Op.CONCAT:
            result.lacking[node.id] = missing
        kept = replace(node, inputs=tuple(item for item in read if item not in missing))
        kept = _present(kept, missing, result, idle)
        nodes.append(kept)
        latest |= {
            output.name: Column(node.id, output.name) for output in kept.outputs if output.name in names
        }
    missing = tuple(item for item in graph.results if item.column in result.gone)
    return replace(result, graph=_rest(graph, tuple(nodes), moved, missing), missing_results=missing)


def parts(graph: Graph) -> list[Narrowed]:
    """Return the graph for each set of calls that are due together, or as it is if there are too many sets."""
    try:
        return [narrowed(graph, each.idle) for each in due_sets(graph)]
    except PlanError:
        return [Narrowed(graph)]


def _set_idle(
    node: Node,
    result: Narrowed,
    states: Collection[str],
    latest: Mapping[str, Column],
    moved: dict[Column, Column],
) -> None:
    """Record what is gone because a node is idle. ``states``: names of states, which keep their values."""
    result.idle[node.id] = node
    for output in node.outputs:
        column = Column(node.id, output.name)
        if output.name in states:
            moved[column] = latest[output.name]
        else:
            result.gone.add(column)
    if node.makes is not None:
        result.no_rows.add(node.makes)


def _inert(node: Node) -> Node:
    """Return the node as it is in iterations in which it isn't due."""
    return Node(node.id, Op.IDLE, node.name, node.axis, makes=node.makes, place=node.place)


def _present(node: Node, missing: tuple[Input, ...], result: Narrowed, idle: Collection[str]) -> Node:
    """Return a due node with only those outputs that it has. Record the columns that are gone."""
    gone: set[str] = set()
    if node.op is Op.CONCAT:  # a column of the joined rows needs that of every part
        gone = {item.parameter.partition(".")[2] for item in missing}
        node = replace(
            node, inputs=tuple(item for item in node.inputs if item.parameter.partition(".")[2] not in gone)
        )
    elif node.body is not None:
        body = result.bodies[node.id] = narrowed(node.body, idle)
        gone = {item.parameter for item in node.body.results if item.column in body.gone}
        node = replace(node, body=body.graph)
    result.gone |= {Column(node.id, name) for name in gone}
    return replace(node, outputs=tuple(output for output in node.outputs if output.name not in gone))


def _rest(
    graph: Graph, nodes: tuple[Node, ...], moved: Mapping[Column, Column], missing: tuple[Input, ...]
) -> Graph:
    """Return the graph with these nodes, its state at their end, and all results but the ``missing`` ones."""
    results = tuple(item for item in graph.results if item not in missing)
    state = tuple(replace(slot, final=moved.get(slot.final, slot.final)) for slot in graph.state)
    return replace(graph, nodes=nodes, results=results, state=state)
