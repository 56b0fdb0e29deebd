"""Where the weights come from by which a run draws its prompts (``--prompts-by``), and the problems with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlflow.author.columns import PROMPT_ID, Level
from rlflow.author.loss import Loss
from rlflow.author.memory import Table
from rlflow.author.node_options import ReadOptions
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import SETTING, Graph, MemorySlot, Node, Op, Output, all_nodes
from rlflow.errors import Place, Problem, listed, nearest

OPTION = "prompts_by"
Functions = Mapping[str, Stage | Loss]


@dataclass(frozen=True)
class DrawnBy:
    """The weights of a run's records: a column of a table, or what a stage computes from the table's columns."""

    table: str
    column: str  # of the table, or of what the stage returns
    name: str  # of the column in the flow
    reads: tuple[
        Node, ...
    ]  # reads of the table that the weights follow; the weights are as old as one of them
    stage: Node | None = None  # None: the table's column is the weight
    columns: tuple[tuple[str, str], ...] = ()  # parameter of the stage → column of the table

    def __str__(self) -> str:
        return f"{self.table}.{self.name}"


def drawn_by(
    graph: Graph, functions: Functions, written: str, place: Place | None
) -> tuple[DrawnBy | None, list[Problem]]:
    """Find the weights that ``--prompts-by`` names as TABLE.COLUMN. Returns None and the problem if it can't be.

    ``functions``: each node's stage or loss. ``place``: the flow's place, for messages.
    """
    name, _, column = written.partition(".")
    tables = _tables(graph)
    if name not in tables or not column:
        return None, [_no_table(written, name, graph.memory, place)]
    spec = tables[name]
    if spec.key != PROMPT_ID:
        return None, [_other_key(written, name, spec, place)]
    if column in dict(spec.columns):
        reads = (node for node in all_nodes(graph.nodes) if node.op is Op.READ and node.memory == name)
        return DrawnBy(name, column, column, tuple(reads)), []
    givers = [giver for giver in _givers(graph, name, functions) if giver.column == column]
    fit = next((giver for giver in givers if not giver.fault), None)
    if fit is not None:
        return fit.drawn_by(name), []
    if givers:
        return None, [_unfit(written, name, spec, givers[0])]
    given = [giver.column for giver in _givers(graph, name, functions) if not giver.fault]
    return None, [_no_column(name, column, [*dict(spec.columns), *given], place)]


def _tables(graph: Graph) -> dict[str, Table]:
    return {slot.name: slot.spec for slot in graph.memory if isinstance(slot.spec, Table)}


def possible(graph: Graph, node: Node, stage: Stage | Loss | None) -> list[str]:
    """Return what ``--prompts-by`` could name to draw prompts by the columns of a stage, as TABLE.COLUMN."""
    tables = [name for name, spec in _tables(graph).items() if spec.key == PROMPT_ID]
    return [
        f"{table}.{output.name}"
        for table in tables
        for output in node.outputs
        if not _fault(graph, node, table, output, stage)
    ]


@dataclass(frozen=True)
class _Giver:
    """A stage that gives a column."""

    part: Graph  # the graph that the stage is a node of
    node: Node
    column: str
    fault: str  # why the stage can't give weights for all records, or ""

    def drawn_by(self, table: str) -> DrawnBy:
        """Return the weights that the column is. The stage must have no fault."""
        read = self.part.nodes[self.node.inputs[0].column.node]
        columns = tuple((item.parameter, read.output(item.column.name).source) for item in self.node.inputs)
        source = self.node.output(self.column).source
        return DrawnBy(table, source, self.column, (read,), self.node, columns)


def _givers(graph: Graph, table: str, functions: Functions) -> Iterator[_Giver]:
    """Yield each column of each stage of a graph, and of the bodies in it."""
    for node in graph.nodes:
        if node.body is not None:
            yield from _givers(node.body, table, functions)
        for output in node.outputs if node.op is Op.STAGE else ():
            yield _Giver(
                graph, node, output.name, _fault(graph, node, table, output, functions.get(node.name))
            )


def _fault(part: Graph, node: Node, table: str, output: Output, stage: Stage | Loss | None) -> str:
    """Return why a stage can't give weights for all records, or "" if it can. ``part``: the node's graph."""
    makers = {item.parameter: part.nodes[item.column.node] for item in node.inputs}
    others = [
        name.removeprefix(SETTING)
        for name, maker in makers.items()
        if maker.op is not Op.READ or maker.memory != table
    ]
    if others:
        return f"'{node.name}' also reads {listed(others)}"
    if (calls := len({maker.id for maker in makers.values()})) != 1:
        return f"'{node.name}' reads columns of {calls} calls of {table}.read"
    if not node.pure:
        return f"'{node.name}' has side effects (pure=False)"
    if node.role:
        return f"'{node.name}' uses the role '{node.role}'"
    if node.dispatch != "DP_COMPUTE" or node.rows == "group":
        return f"'{node.name}' needs several rows: dispatch={node.dispatch}, rows={node.rows!r}"
    if isinstance(stage, Stage) and stage.draws:
        return f"'{node.name}' draws random numbers"
    if output.kind is not None and output.kind.level is not Level.ROW:
        return f"'{output.name}' is {output.kind}"
    return ""


def _no_table(written: str, name: str, memory: tuple[MemorySlot, ...], place: Place | None) -> Problem:
    known = [slot.name for slot in memory]
    return Problem(
        "prompts-by-table",
        f"--prompts-by names no column of a table: the flow has no table '{name}'"
        if name not in known
        else f"--prompts-by names the table '{name}' without a column",
        place,
        found=written,
        expected=f"TABLE.COLUMN with one of the flow's tables: {listed(known)}",
        nearest=nearest(name, known),
        remedy="name a table of @flow(keeps=…) and one of its columns, or leave --prompts-by out",
        setting=OPTION,
    )


def _other_key(written: str, name: str, spec: Table, place: Place | None) -> Problem:
    return Problem(
        "prompts-by-key",
        f"--prompts-by {written}: the numbers of '{name}' do not belong to records of the data",
        place,
        found=f"a table by {spec.key}",
        expected=f"a table by {PROMPT_ID}",
        remedy=f'keep the numbers in a table of its own: table(key="{PROMPT_ID}", …)',
        setting=OPTION,
    )


def _no_column(table: str, column: str, columns: list[str], place: Place | None) -> Problem:
    close = nearest(column, columns)
    return Problem(
        "prompts-by-column",
        f"--prompts-by {table}.{column}: neither the table nor a stage that reads it has this column",
        place,
        found=f"{table}.{column}",
        expected=f"one of {listed(f'{table}.{each}' for each in dict.fromkeys(columns))}",
        nearest=f"{table}.{close}" if close else None,
        remedy="name one of them, or add a stage to the flow that computes it from the table's columns alone",
        setting=OPTION,
    )


def _unfit(written: str, name: str, spec: Table, giver: _Giver) -> Problem:
    node, first = giver.node, spec.columns[0][0]
    return Problem(
        "prompts-by-stage",
        f"--prompts-by {written}: stage '{node.name}' cannot weigh records that are not in the batch",
        node.place,
        node.definition,
        found=giver.fault,
        expected=f"a pure stage with dispatch=DP_COMPUTE that reads only what one call of {name}.read gives, and "
        "gives a number per row",
        remedy=f"compute the weight in a stage of its own, or draw by a column of the table: {name}.{first}",
        setting=OPTION,
    )


def stale_problem(drawn: DrawnBy, staleness: int) -> Iterator[Problem]:
    """Yield the problem of iterations ahead whose prompts are drawn by numbers that earlier iterations write.

    Their author must have said that a read of the table may be old.
    """
    if any(read.options(ReadOptions).stale_ok is not None for read in drawn.reads):
        return
    read = drawn.reads[0] if drawn.reads else None
    yield Problem(
        "staleness-draw",
        f"--staleness {staleness}: prompts of iterations ahead are drawn by '{drawn}', before the iterations in "
        f"between have written '{drawn.table}'",
        read.place if read else None,
        found=f"{read.name}(…) without stale_ok" if read else f"no {drawn.table}.read",
        expected="a read that may miss the writes of the last iterations",
        remedy=f'write {drawn.table}.read(prompts, stale_ok="the reason"), so that draws may miss them too; or '
        "remove --staleness",
    )
