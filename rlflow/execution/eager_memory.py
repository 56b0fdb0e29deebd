"""Tables and buffers in eager flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.author.batch import Batch, empty
from rlflow.author.columns import Kind, row, standard_kind
from rlflow.author.memory import NUMBER, Buffer, Table
from rlflow.author.node_options import DrawOptions
from rlflow.author.signature import ColumnParameter, Signature
from rlflow.author.source_lines import call_place
from rlflow.compiler.graph.model import Graph, Op
from rlflow.compiler.trace import memory_rules
from rlflow.errors import FlowError
from rlflow.execution.apply import failing
from rlflow.execution.eager import Session, check_columns, reading, real, session_of
from rlflow.execution.engine import Engine
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.not_due import none_of


class EagerTable:
    """A table in an eager flow. Each call runs immediately, but writes take effect when the iteration ends."""

    def __init__(self, name: str, engine: Engine) -> None:
        self._name = name
        self._engine = engine

    def __repr__(self) -> str:
        return f"<table {self._name}>"

    @property
    def _spec(self) -> Table:
        return self._engine.table(self._name).spec

    def _call(self, method: str, batch: Any) -> tuple[Session, str, Batch]:
        """Count a call of ``method``. Return its session, the name of its node, and the batch."""
        session = session_of(self._engine)
        _, node = session.next_call(f"{self._name}.{method}")
        batch = real(node, batch)
        check_columns(node, reading(self._spec.key, row("int64")), batch, call_place(), None)
        return session, node, batch

    def read(self, batch: Batch, *, stale_ok: str | None = None) -> Batch:
        """Return the table's numbers for the key of each row.

        ``stale_ok``: why the numbers may be old when rows are sampled ahead of training. It has no effect
        here.
        """
        session, node, batch = self._call("read", batch)
        FlowError.refuse(memory_rules.reason(node, stale_ok, call_place()))
        if self._name in session.memory:
            raise FlowError(memory_rules.read_late(node, self._name, None, call_place()))
        if session.follows(batch, self._spec.key):
            return Batch(batch.axis, none_of(dict.fromkeys((name for name, _ in self._spec.columns), NUMBER)))
        with failing(node, self._engine.iteration, batch, call_place()):
            return self._engine.read(self._name, Batch(batch.axis, {"key": batch.data[self._spec.key]}))

    def write(self, batch: Batch, **reducers: Any) -> None:
        """Write columns of the batch. ``reducers``: how the numbers of a key are combined, by column."""
        session, node, batch = self._call("write", batch)
        FlowError.refuse(memory_rules.write_problems(node, self._name, self._spec, reducers, call_place()))
        if self._name in session.memory or session.within:
            raise FlowError(memory_rules.written_again(node, self._name, None, call_place()))
        chosen = {column: memory_rules.reducer_of(reducer) for column, reducer in reducers.items()}
        if session.follows(batch, self._spec.key, *chosen):
            return
        for column in chosen:
            check_columns(node, reading(column, row), batch, call_place(), None)
        rows = Batch(
            batch.axis,
            {"key": batch.data[self._spec.key], **{column: batch.data[column] for column in chosen}},
        )
        with failing(node, self._engine.iteration, rows, call_place()):
            session.memory[self._name], metrics = self._engine.write(self._name, rows, chosen)
        session.log(node, metrics)


class EagerBuffer:
    """A buffer in an eager flow. Each call runs immediately, but changes take effect when the iteration ends."""

    def __init__(self, name: str, engine: Engine, graph: Graph) -> None:
        """Make the buffer ``name``. ``graph``: the flow's graph, for the columns of a draw without rows."""
        self._name = name
        self._engine = engine
        draw = next((node for node in graph.nodes if node.op is Op.DRAW and node.memory == name), None)
        self._kinds: Mapping[str, Kind] = {
            output.source: output.kind or row for output in (draw.outputs if draw else ())
        }

    def __repr__(self) -> str:
        return f"<buffer {self._name}>"

    @property
    def _spec(self) -> Buffer:
        return self._engine.buffer(self._name).spec

    def _call(self, method: str) -> tuple[Session, str]:
        """Return the session of a call of ``method``, and the name of its node."""
        session = session_of(self._engine)
        return session, session.next_call(f"{self._name}.{method}", counts=False)[1]

    def _changed(self, session: Session) -> KeptBuffer:
        """Return the buffer as the iteration has changed it so far."""
        kept = session.memory.get(self._name)
        return kept if isinstance(kept, KeptBuffer) else self._engine.buffer(self._name)

    def draw(
        self,
        *,
        groups: int | None = None,
        rows: int | None = None,
        weight: str | None = None,
        strata: str | None = None,
        newest: bool = False,
    ) -> Batch:
        """Return stored rows: by default all, or at most this number of groups or rows. See `buffer`."""
        session, node = self._call("draw")
        place, count = call_place(), {"groups": groups, "rows": rows}
        options = DrawOptions(count[self._spec.unit], weight, strata, newest)
        FlowError.refuse(memory_rules.draw_problems(node, self._spec, count, options, place))
        if session.within:
            raise FlowError(memory_rules.drawn_again(node, place))
        if self._name in session.puts:
            raise FlowError(memory_rules.read_late(node, self._name, None, place, "put"))
        with failing(node, self._engine.iteration, Batch.of({}), place):
            batch, numbers, metrics = self._engine.draw(self._name, node, options)
        session.memory[self._name] = self._changed(session).after_draw(numbers)
        session.log(node, metrics)
        session.drawn.append(batch.axis)
        none = {} if len(batch) else {name: empty(kind) for name, kind in self._kinds.items()}
        return Batch(batch.axis, none | batch.data)

    def put(self, batch: Batch, *, also: Sequence[str] = ()) -> None:
        """Put the rows of a batch into the buffer. ``also``: more columns to store with them."""
        session, node = self._call("put")
        batch, place = real(node, batch), call_place()
        FlowError.refuse(memory_rules.also_problems(node, also, place))
        if self._name in session.puts or session.within:
            raise FlowError(memory_rules.written_again(node, self._name, None, place))
        if self._spec.unit == "groups" and not batch.axis.grouped:
            raise FlowError(memory_rules.no_groups(node, place))
        known = self._engine.buffer(self._name).names
        names = tuple(dict.fromkeys((*memory_rules.NEEDED, *also, *known)))
        if session.follows(batch, *names):  # made by calls that are not due in this iteration
            return
        parameters = tuple(ColumnParameter(name, standard_kind(name), False) for name in names)
        check_columns(node, Signature(parameters, {}, False), batch, place, None)
        stored = batch.select(*dict.fromkeys((*(n for n in memory_rules.STORED if n in batch), *names)))
        with failing(node, self._engine.iteration, stored, place):
            session.memory[self._name], metrics = self._engine.put(self._changed(session), stored)
        session.puts.add(self._name)
        session.log(node, metrics)
