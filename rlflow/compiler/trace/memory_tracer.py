"""Tracing of calls on what a flow keeps across iterations: reads and writes of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.author.columns import row
from rlflow.author.memory import NUMBER, Table
from rlflow.author.node_options import ReadOptions, WriteOptions
from rlflow.author.signature import ColumnParameter
from rlflow.author.source_lines import call_place
from rlflow.compiler.graph.model import Input, Op
from rlflow.compiler.trace import memory_rules
from rlflow.compiler.trace.row_tracer import RowTracer
from rlflow.compiler.trace.symbols import SymbolicBatch
from rlflow.errors import FlowError


class MemoryTracer(RowTracer):
    """Records a flow's calls on tables while the flow is traced."""

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

    def _of_key(self, batch: SymbolicBatch, spec: Table, what: str) -> tuple[Input, ...]:
        """Return the input that has each row's key. Its parameter is called ``key``."""
        columns = [ColumnParameter(spec.key, row("int64"), False)]
        return tuple(Input("key", item.column) for item in self.inputs(batch, columns, what, None))
