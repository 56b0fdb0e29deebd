"""The graph recorded by a trace: its nodes, and how symbolic batches read and merge columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.author.columns import CLOCK, PROMPT_ID, Kind, Level, fits, scalar, standard_kind
from rlflow.author.loss import Loss
from rlflow.author.node_options import NodeOptions
from rlflow.author.scope import current
from rlflow.author.signature import ColumnParameter
from rlflow.author.source_lines import call_place
from rlflow.author.stage import Stage
from rlflow.compiler.graph.ancestry import Merge, merge, origins, sources
from rlflow.compiler.graph.model import Column, Input, Node, Op, Output, RowAxis
from rlflow.compiler.trace import column_rules, rules
from rlflow.compiler.trace.symbols import ColumnSource, RecordedGraph, SymbolicBatch
from rlflow.errors import FlowError, Place, Problem

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec


NO_OPTIONS = NodeOptions()
STATE = scalar("float32")  # the kind of a state


@dataclass(frozen=True)
class Context:
    """What the tracer needs to know about the run.

    ``settings``: names of the flow's settings, for hints. ``roles``: names of the roles. ``reward_reads``:
    the columns that reward functions read.
    """

    settings: tuple[str, ...] = ()
    reward_reads: tuple[str, ...] = ("completion", "answer")
    roles: tuple[str, ...] = ()
    # column → place of the function that reads it
    reward_places: Mapping[str, Place] = field(default_factory=dict)
    # call, such as actor.generate#2 → settings that replace the flow's
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()  # fields of the data's file, for messages
    # role → its environment; the key "" stands for the only role that samples
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)  # role → weight, for each of ``*rewards``


@dataclass(frozen=True)
class StoredColumns:
    """What a flow puts into a buffer."""

    kinds: Mapping[str, Kind | None]  # kind of each stored column
    grouped: bool = True  # whether the rows have groups
    samples: int = 0  # the largest number of rows in a group; 0: unknown


class GraphRecorder:
    """Records a flow's nodes while it is traced, and reports each problem once."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.recorded = RecordedGraph()
        self.problems: list[Problem] = []
        self.functions: dict[str, Stage | Loss] = {}
        self.bound: dict[str, dict[str, Any]] = {}  # node → the settings of its stage or loss
        self.state: dict[str, ColumnSource] = {}
        self.written: dict[str, Place | None] = {}  # memory → place of its write, once it is recorded
        self.calls = 0
        self.stored: dict[str, StoredColumns] = {}  # buffer → what the flow puts into it
        # the same, as an earlier trace of the flow found it; draws stand before puts
        self.drawable: Mapping[str, StoredColumns] = {}
        self.weighed: set[str] = set()  # roles of ``*rewards`` whose weight the flow asked for
        # True if something read ``prompt_id``; the data give this column only then
        self.reads_prompt_id = False
        self._poisoned: set[tuple[int, str]] = set()
        self._names: dict[str, int] = {}
        self.depth = 0
        self.prefix = ""  # prefix of the names of nodes
        self.temperatures = True  # False: the run's settings do not replace the flow's temperatures

    def axis(self, axis: RowAxis) -> int:
        """Record an axis of rows and return its number."""
        self.recorded.axes.append(axis)
        return len(self.recorded.axes) - 1

    def add(
        self,
        op: Op,
        name: str,
        axis: int,
        settings: NodeOptions = NO_OPTIONS,
        counts: bool = True,
        **fields: Any,
    ) -> Node:
        """Append a node, with a unique name made from ``name``, and return it.

        ``counts``: whether the call takes a number in program order. If not, the calls after it draw the same
        random numbers as in a flow without it.
        """
        unique, counted = self._unique(name), self.prefix + name
        self._names[counted] = self._names.get(counted, 0) + 1
        node = Node(len(self.recorded.nodes), op, unique, axis, call=self.calls, settings=settings, **fields)
        self.recorded.nodes.append(node)
        self.calls += counts
        return node

    def _unique(self, name: str) -> str:
        """Return the unique name for the next node called ``name``."""
        counted = self.prefix + name
        count = self._names.get(counted, 0) + 1
        return counted if count == 1 else f"{counted}#{count}"

    def symbols(self, node: Node) -> SymbolicBatch:
        """Return a symbolic batch of the columns that a node returns."""
        return self.batch(
            node.rows_axis, {o.name: ColumnSource(Column(node.id, o.name), o.kind) for o in node.outputs}
        )

    def batch(self, axis: int, sources: Mapping[str, ColumnSource]) -> SymbolicBatch:
        """Return a symbolic batch of these columns on the given axis."""
        return SymbolicBatch(self, self.recorded, axis, sources)

    def report(self, *problems: Problem) -> None:
        """Store problems, skipping those already stored."""
        self.problems += [problem for problem in dict.fromkeys(problems) if problem not in self.problems]

    def state_columns(self, kinds: Mapping[str, Kind | None]) -> dict[str, ColumnSource]:
        """Append a node that provides the state scalars, if there are any, and return its columns."""
        return self._scalars("state", kinds) if kinds else {}

    def _scalars(self, name: str, kinds: Mapping[str, Kind | None]) -> dict[str, ColumnSource]:
        """Append a node for scalars known before an iteration starts, and return its columns."""
        outputs = tuple(Output(column, kind, column) for column, kind in kinds.items())
        node = Node(len(self.recorded.nodes), Op.STATE, name, 0, outputs=outputs)
        self.recorded.nodes.append(node)
        return self.symbols(node).sources

    def mine(self, batch: Any, what: str) -> SymbolicBatch:
        """Return the batch, or raise FlowError if it doesn't belong to the graph being recorded.

        ``what`` names the call that uses it.
        """
        if not isinstance(batch, SymbolicBatch):
            raise FlowError(rules.not_a_batch(what, batch, call_place()))
        scope: object = current()
        if scope is not self or batch.recorded is not self.recorded:
            raise FlowError(rules.leaked(call_place()))
        return batch

    def find(self, batch: SymbolicBatch, name: str, what: str) -> ColumnSource | None:
        """Return the column ``name``. If there is none, report a problem and return None."""
        self.mine(batch, what)
        source = batch.sources.get(name)
        if source is None:
            place, number = call_place(), name in self.state or name in CLOCK
            self._missing(
                batch,
                name,
                what,
                place,
                None,
                column_rules.state_as_column(what, name, place) if number else None,
            )
        return source

    def scalar(self, name: str) -> ColumnSource | None:
        """Return the scalar ``name`` if every batch has it, or else None.

        This applies to the flow's state, ``iteration`` and ``progress``.
        """
        if name in self.state or name not in CLOCK:
            return self.state.get(name)
        if not self.recorded.clock:
            self.recorded.clock = self._scalars("clock", {name: standard_kind(name) for name in CLOCK})
        return self.recorded.clock[name]

    def _missing(
        self,
        batch: SymbolicBatch,
        name: str,
        what: str,
        place: Place | None,
        definition: Place | None,
        problem: Problem | None = None,
    ) -> None:
        """Report that a batch lacks a column, or report ``problem`` instead.

        This is done only once per column and row axis.
        """
        self.reads_prompt_id |= name == PROMPT_ID
        if (batch.axis, name) not in self._poisoned:
            self._poisoned.add((batch.axis, name))
            self.report(
                self._dropped(batch, name, False, what, place)
                or problem
                or column_rules.missing(
                    what, name, self.visible(batch), place, definition, self.context.settings
                )
            )

    def visible(self, batch: SymbolicBatch) -> list[str]:
        """Return the names of columns and state scalars that a call on this batch can read."""
        return [*batch.sources, *(name for name in self.state if name not in batch.sources)]

    def inputs(
        self, batch: SymbolicBatch, parameters: Iterable[ColumnParameter], what: str, definition: Place | None
    ) -> tuple[Input, ...]:
        """Return a call's inputs, one per parameter, and report problems with the columns.

        Parameters whose column is missing get no input.
        """
        inputs, place = [], call_place()
        for parameter in parameters:
            source = self.scalar(parameter.name) or batch.sources.get(parameter.name)
            if source is None:
                self._absent(batch, parameter, what, place, definition)
                continue
            if not fits(source.kind, parameter.kind):
                self.report(column_rules.wrong_kind(what, parameter, source.kind, place, definition))
            inputs.append(Input(parameter.name, source.column))
        return tuple(inputs)

    def _absent(
        self,
        batch: SymbolicBatch,
        parameter: ColumnParameter,
        what: str,
        place: Place | None,
        definition: Place | None,
    ) -> None:
        self.reads_prompt_id |= parameter.name == PROMPT_ID
        if parameter.optional:
            self.report(
                self._dropped(batch, parameter.name, True, what, place)
                or column_rules.optional_absent(what, parameter.name, place, definition)
            )
        else:
            self._missing(batch, parameter.name, what, place, definition)

    def _outputs(
        self,
        what: str,
        kinds: Mapping[str, Kind | None],
        names: tuple[str, ...] | None,
        place: Place | None,
        definition: Place | None,
    ) -> tuple[Output, ...]:
        """Return a call's outputs, after checking them against the standard columns.

        ``kinds``: the columns that the function returns, by name. ``names``: what they are called here, or
        None to keep their names.
        """
        if names is not None and (len(names) != len(kinds) or len(set(names)) != len(names)):
            self.report(column_rules.gives_count(what, names, kinds, place, definition))
            names = None
        outputs = []
        for source, name in zip(kinds, names or kinds, strict=True):
            kind, table = kinds[source], STATE if name in self.state else standard_kind(name)
            if name in column_rules.OF_THE_DATA:
                self.report(column_rules.gives_prompt(what, name, place, definition))
                continue  # later readers get the data's column
            if name in column_rules.OF_THE_RUN:
                self.report(column_rules.gives_run(what, name, place, definition))
                continue
            if kind is not None and table is not None and not fits(kind, table):
                other = column_rules.state_rows if name in self.state else column_rules.table_kind
                self.report(other(what, name, kind, table, place, definition))
                kind = table  # later readers are checked against the correct kind
            if kind is None and table is None:
                self.report(column_rules.own_column(what, name, place, definition))
            outputs.append(Output(name, kind if kind is not None else table, source))
        return tuple(outputs)

    def _dropped(
        self, batch: SymbolicBatch, name: str, optional: bool, what: str, place: Place | None
    ) -> Problem | None:
        """Return the problem of reading a column that a `concat` dropped, or None if none did."""
        axes = self.recorded.axes
        for axis in sorted(origins(axes, batch.axis), reverse=True):
            column = self.recorded.dropped.get(axis, {}).get(name)
            of_tokens = column is not None and column.kind is not None and column.kind.level is Level.TOKEN
            if column is not None and (not of_tokens or axis in sources(axes, batch.axis)):
                return column_rules.dropped(what, name, *column, optional, place)
        return None

    def note_dropped(self, batch: SymbolicBatch, names: Iterable[str], what: str) -> None:
        """Report those of the columns ``names``, which a call reads if there are any, that a `concat` dropped."""
        place = call_place()
        problems = (
            self._dropped(batch, name, True, what, place) for name in names if name not in batch.sources
        )
        self.report(*(problem for problem in problems if problem is not None))

    def rename(self, batch: SymbolicBatch, names: Mapping[str, str]) -> SymbolicBatch:
        """Rename columns as in ``names``, from old to new, and report problems."""
        renamed = {}
        for old, new in names.items():
            source, table = self.find(batch, old, "rename"), standard_kind(new)
            # a prompt column that gets its own name back is the data's column
            if source and new in column_rules.OF_THE_DATA and source.column.name != new:
                self.report(column_rules.gives_prompt("rename", new, call_place(), None))
                continue
            if source and new in column_rules.OF_THE_RUN:
                self.report(column_rules.gives_run("rename", new, call_place(), None))
                continue
            if source and not fits(source.kind, table):
                self.report(column_rules.table_kind("rename", new, source.kind, table, call_place(), None))
                source = ColumnSource(source.column, table)
            if source:
                renamed[new] = source
        rest = {name: source for name, source in batch.sources.items() if names.get(name) not in renamed}
        self._replace(rest, renamed, call_place())
        return batch._with(rest | renamed)

    def _replace(
        self, sources: Mapping[str, ColumnSource], by: Mapping[str, ColumnSource], place: Place | None
    ) -> None:
        """Record which columns in ``sources`` are replaced by those of the same name in ``by``."""
        columns = {name: sources[name].column for name in by if name in sources}
        self.recorded.replaced += [
            (column, place) for name, column in columns.items() if column != by[name].column
        ]

    def merge(self, batch: SymbolicBatch, other: SymbolicBatch) -> SymbolicBatch:
        """Add the columns of ``other`` to ``batch``.

        If their rows are unrelated, report that and return ``batch`` as is.
        """
        self.mine(batch, "|"), self.mine(other, "|")
        place = call_place()
        problems = self._unrelated(batch.axis, other, place)
        self.report(*problems)
        if any(problem.code == "row-axes" for problem in problems):
            self._poisoned |= {(batch.axis, name) for name in other.sources if name not in batch.sources}
            return batch
        self._replace(batch.sources, other.sources, place)
        return batch._with(batch.sources | self._coming_up(batch.axis, other))

    def _coming_up(self, axis: int, other: SymbolicBatch) -> dict[str, ColumnSource]:
        """Return the columns of ``other`` as they are for the rows of ``axis``.

        Columns of follow-up prompts become token columns if the prompts continue responses from single
        tokens.
        """
        return {
            name: ColumnSource(source.column, Kind(Level.TOKEN, source.kind.dtype))
            if source.kind and self._way(axis, other, source.kind) is Merge.TOKENS
            else source
            for name, source in other.sources.items()
        }

    def _way(self, axis: int, other: SymbolicBatch, kind: Kind | None) -> Merge:
        return merge(self.recorded.axes, axis, other.axis, kind is not None and kind.level is Level.GROUP)

    def _unrelated(self, axis: int, other: SymbolicBatch, place: Place | None) -> list[Problem]:
        """Return the problems of merging ``other``: unrelated rows, or rows that get no value.

        ``axis``: the axis of the rows that get the columns.
        """
        ways = {
            name: self._way(axis, other, source.kind)
            for name, source in other.sources.items()
            if not is_scalar(source.kind)
        }
        tokens = [
            name for name, source in other.sources.items() if source.kind and source.kind.level is Level.TOKEN
        ]
        if Merge.NEVER in ways.values() or (tokens and Merge.WHOLE not in ways.values()):
            return [column_rules.other_rows(other.sources, tokens, place)]
        some = {
            name: other.sources[name].kind for name, way in ways.items() if way in (Merge.SOME, Merge.TOKENS)
        }
        return [
            column_rules.lacking_rows(name, kind, place)
            for name, kind in some.items()
            if kind and kind.family != "float"
        ]


def is_scalar(kind: Kind | None) -> bool:
    """Return True if a column is known to have one value for all rows."""
    return kind is not None and kind.level is Level.SCALAR
