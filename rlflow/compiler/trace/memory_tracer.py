"""Tracing of calls on what a flow keeps across iterations: tables and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlflow.author.columns import Kind, Level, row, standard_kind
from rlflow.author.memory import NUMBER, Buffer, Table
from rlflow.author.node_options import DrawOptions, ReadOptions, WriteOptions
from rlflow.author.signature import ColumnParameter
from rlflow.author.source_lines import call_place
from rlflow.compiler.graph.ancestry import line
from rlflow.compiler.graph.model import Input, Op, Output, RowAxis
from rlflow.compiler.trace import memory_rules
from rlflow.compiler.trace.graph_recorder import StoredColumns
from rlflow.compiler.trace.row_tracer import RowTracer
from rlflow.compiler.trace.symbols import SymbolicBatch
from rlflow.errors import FlowError


class MemoryTracer(RowTracer):
    """Records a flow's calls on tables and buffers while the flow is traced."""

    def read(self, name: str, spec: Table, batch: Any, stale_ok: str | None) -> SymbolicBatch:
        """Record a read of a table and return its numbers for the rows of the batch."""
        what, place = f"{name}.read", call_place()
        batch = self.mine(batch, what)
        self.report(*memory_rules.reason(what, stale_ok, place))
        if (written := self.written.get(name)) is not None:
            self.report(memory_rules.read_late(what, name, written, place))
        kinds = {column: NUMBER for column, _ in spec.columns}
        node = self.add(
            Op.READ,
            what,
            batch.axis,
            inputs=self._of_key(batch, spec, what),
            outputs=self._outputs(what, kinds, None, place, None),
            settings=ReadOptions(stale_ok),
            memory=name,
            place=place,
        )
        return self.symbols(node)

    def write(self, name: str, spec: Table, batch: Any, reducers: Mapping[str, Any]) -> None:
        """Record a write of a table. ``reducers``: how it combines numbers, by column."""
        what, place = f"{name}.write", call_place()
        batch = self.mine(batch, what)
        FlowError.refuse(memory_rules.write_problems(what, name, spec, reducers, place))
        if (written := self.written.get(name)) is not None or self.depth:
            self.report(memory_rules.written_again(what, name, written, place))
        chosen = {column: memory_rules.reducer_of(reducer) for column, reducer in reducers.items()}
        columns = [ColumnParameter(column, row, False) for column in chosen]
        self.add(
            Op.WRITE,
            what,
            batch.axis,
            inputs=self._of_key(batch, spec, what) + self.inputs(batch, columns, what, None),
            settings=WriteOptions(
                tuple(reducer.rule for reducer in chosen.values()),
                tuple(reducer.rate for reducer in chosen.values()),
            ),
            memory=name,
            place=place,
        )
        self.written[name] = place

    def draw(self, name: str, spec: Buffer, count: Mapping[str, Any], options: DrawOptions) -> SymbolicBatch:
        """Record a draw from a buffer, and return the drawn rows, which have an axis of their own.

        ``count``: the number of groups and of rows, as the flow gives them. ``options``: the other settings.
        """
        what, place = f"{name}.draw", call_place()
        FlowError.refuse(memory_rules.draw_problems(what, spec, count, options, place))
        if self.depth:
            self.report(memory_rules.drawn_again(what, place))
        if (written := self.written.get(name)) is not None:
            self.report(memory_rules.read_late(what, name, written, place, "put"))
        stored = self.drawable.get(name, memory_rules.NOTHING_PUT)
        makes = self.axis(RowAxis(None, stored.samples, stored.grouped, "drawn"))
        kinds = {**stored.kinds, **memory_rules.DRAWN}
        kinds |= {"group": standard_kind("group")} if stored.grouped else {}
        node = self.add(
            Op.DRAW,
            what,
            0,
            counts=False,
            outputs=tuple(Output(column, kind, column) for column, kind in kinds.items()),
            settings=replace(options, count=count[spec.unit]),
            memory=name,
            makes=makes,
            place=place,
        )
        return self.symbols(node)

    def put(self, name: str, spec: Buffer, batch: Any, also: Sequence[str]) -> None:
        """Record that the rows of a batch are put into a buffer. ``also``: more columns to store."""
        what, place = f"{name}.put", call_place()
        batch = self.mine(batch, what)
        FlowError.refuse(memory_rules.also_problems(what, also, place))
        if (written := self.written.get(name)) is not None or self.depth:
            self.report(memory_rules.written_again(what, name, written, place))
        axis = self.recorded.axes[batch.axis]
        if spec.unit == "groups" and not axis.grouped:
            self.report(memory_rules.no_groups(what, place))
        names = [column for column in memory_rules.STORED if column in batch.sources]
        parameters = [ColumnParameter(column, standard_kind(column), False) for column in names]
        parameters += [
            ColumnParameter(column, standard_kind(column), False)
            for column in dict.fromkeys((*memory_rules.NEEDED, *also))
            if column not in names
        ]
        inputs = self.inputs(batch, parameters, what, None)
        self.add(Op.PUT, what, batch.axis, counts=False, inputs=inputs, memory=name, place=place)
        self.written[name] = place
        self.stored[name] = StoredColumns(
            {
                item.parameter: _per_row(source.kind)
                for item in inputs
                if (source := batch.sources.get(item.parameter)) is not None
            },
            axis.grouped,
            max(self._samples(batch.axis), default=0),
        )

    def _samples(self, axis: int) -> list[int]:
        """Return the numbers of rows that groups of an axis may have, as far as they are known."""
        axes = self.recorded.axes
        own = [axes[step] for step in line(axes, axis)]
        return [entry.samples for entry in own if entry.samples][:1] + [
            samples for entry in own for part in entry.parts for samples in self._samples(part)
        ]

    def _of_key(self, batch: SymbolicBatch, spec: Table, what: str) -> tuple[Input, ...]:
        """Return the input that has each row's key. Its parameter is called ``key``."""
        columns = [ColumnParameter(spec.key, row("int64"), False)]
        return tuple(Input("key", item.column) for item in self.inputs(batch, columns, what, None))


def _per_row(kind: Kind | None) -> Kind | None:
    return Kind(Level.ROW, kind.dtype) if kind is not None and kind.level is Level.GROUP else kind
