"""Tracing of calls that make a batch with different rows: `ask`, `encode`, `choose`, `concat` and `repeat`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlflow.author import methods
from rlflow.author.columns import OF_PROMPTS, Kind, Level, row, standard_kind, text
from rlflow.author.methods import Setting
from rlflow.author.node_options import (
    AskOptions,
    ChooseOptions,
    ConcatOptions,
    EncodeOptions,
    RepeatOptions,
)
from rlflow.author.schedule import CallSchedule
from rlflow.author.scope import AskWay
from rlflow.author.signature import ColumnParameter
from rlflow.author.source_lines import call_place, definition_place, digest
from rlflow.compiler.graph.ancestry import common_prompts, line, sources
from rlflow.compiler.graph.model import Graph, Input, Node, Op, Output, RowAxis, without_unread_parts
from rlflow.compiler.trace import column_rules, graph_rules, repeat_rules, rules
from rlflow.compiler.trace.graph_recorder import GraphRecorder, is_scalar
from rlflow.compiler.trace.symbols import ColumnSource, DroppedColumn, RecordedGraph, SymbolicBatch
from rlflow.errors import FlowError, Place, listed

# columns that follow-up prompts do not keep
LEFT_BEHIND = ("completion", "finish", "group", "prefix_length", *OF_PROMPTS, *column_rules.OF_THE_DATA)

# columns of the old responses, which rows with encoded responses do not keep
OLD_RESPONSE = (*methods.GENERATE_GIVES, *methods.EPISODE_GIVES, "group")
ENCODE_GIVES = ("tokens", "mask", "completion", "finish", "temperature", "policy_version", "group")

OF_JOINED = ("group", "part")  # columns that joined rows get anew

ASK_GIVES: dict[AskWay, tuple[str, ...]] = {
    "text": column_rules.OF_THE_DATA,
    "after": column_rules.OF_THE_DATA,
    "until": ("prompt_tokens", "prefix_length"),
}


class RowTracer(GraphRecorder):
    """Records calls that make a batch with different rows while a flow is traced."""

    def ask(self, batch: Any, column: str, way: AskWay) -> SymbolicBatch:
        """Record an `ask` call and return its follow-up prompts."""
        place = call_place()
        batch = self.mine(batch, "ask")
        kind = rules.until_kind(batch.columns.get(column)) if way == "until" else text
        inputs = [
            Input("until" if way == "until" else "text", item.column)
            for item in self.inputs(batch, [ColumnParameter(column, kind, False)], "ask", None)
        ]
        inputs += (
            self._model_inputs(batch, "ask", ("prefix_length",) if way == "until" else ())
            if way != "text"
            else ()
        )
        by_token = way == "until" and kind.level is Level.TOKEN
        makes = self.axis(RowAxis(batch.axis, 0 if by_token else 1, step="cut" if by_token else "asked"))
        outputs = tuple(Output(name, standard_kind(name), name) for name in ASK_GIVES[way])
        node = self.add(
            Op.ASK,
            "ask",
            batch.axis,
            inputs=tuple(inputs),
            outputs=outputs,
            settings=AskOptions(self._sampler(batch) if way != "text" else ()),
            makes=makes,
            place=place,
        )
        along = {
            name: source for name, source in batch.sources.items() if way == "until" and name in OF_PROMPTS
        }
        return self.batch(makes, follow_up_columns(batch.sources) | along | self.symbols(node).sources)

    def _sampler(self, batch: SymbolicBatch) -> tuple[str, ...]:
        """Return (role,) for the role whose tokens the rows have, or () if they are of several roles or none."""
        tokens = batch.sources.get("tokens")
        if tokens is None:
            return ()
        node = self.recorded.nodes[tokens.column.node]
        if isinstance(node.settings, EncodeOptions):
            return node.settings.roles
        return (node.role,) if node.role else ()

    def encode(self, batch: Any, column: str, settings: EncodeOptions) -> SymbolicBatch:
        """Record an `encode` call and return the rows with encoded responses."""
        place = call_place()
        batch = self.mine(batch, "encode")
        inputs = tuple(
            Input("text", item.column)
            for item in self.inputs(batch, [ColumnParameter(column, text, False)], "encode", None)
        )
        # with ``prefix_length``, the text continues a response
        reads = ("prompt_tokens", *(name for name in ("prefix_length",) if name in batch.sources))
        inputs += self.inputs(
            batch, [ColumnParameter(name, standard_kind(name), False) for name in reads], "encode", None
        )
        for role in settings.roles:
            self.asked_by(role, batch.axis)
        samples = 0 if self.recorded.axes[batch.axis].grouped else 1
        makes = self.axis(RowAxis(batch.axis, samples, True, "encoded"))
        node = self.add(
            Op.ENCODE,
            "encode",
            batch.axis,
            inputs=inputs,
            outputs=tuple(Output(name, standard_kind(name), name) for name in ENCODE_GIVES),
            settings=settings,
            makes=makes,
            place=place,
        )
        along = {
            name: ColumnSource(source.column, _per_row(source.kind))
            for name, source in batch.sources.items()
            if name not in OLD_RESPONSE and (source.kind is None or source.kind.level is not Level.TOKEN)
        }
        return self.batch(makes, along | self.symbols(node).sources)

    def asked_by(self, role: str, axis: int) -> None:
        """Record that ``role`` reads the follow-up prompts of ``axis``, so they are encoded for it."""
        nearest = next(
            (step for step in line(self.recorded.axes, axis) if self.recorded.axes[step].step == "asked"),
            None,
        )
        for number, node in enumerate(self.recorded.nodes):
            if nearest is not None and node.makes == nearest:
                roles = tuple(dict.fromkeys((*node.options(AskOptions).roles, role)))
                self.recorded.nodes[number] = replace(node, settings=AskOptions(roles))

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> SymbolicBatch:
        """Record a `choose` call and return the chosen rows."""
        place = call_place()
        batch = self.mine(batch, "choose")
        axis, kind = self.recorded.axes[batch.axis], row if settings.count else row("bool")
        inputs = self.inputs(batch, [ColumnParameter(column, kind, False)], "choose", None)
        if settings.per == "group" and not axis.grouped:
            self.report(rules.choose_groups(place))
        flag = batch.columns.get(column)
        whole = flag is not None and flag.level is Level.GROUP and not settings.count
        makes = self.axis(RowAxis(batch.axis, axis.samples if whole else 0, axis.grouped, "chosen"))
        self.add(
            Op.CHOOSE,
            "choose",
            batch.axis,
            inputs=tuple(Input("by", item.column) for item in inputs),
            settings=settings,
            makes=makes,
            place=place,
        )
        return self.batch(makes, batch.sources)

    def concat(self, batches: Sequence[Any], settings: ConcatOptions) -> SymbolicBatch:
        """Record a `concat` call and return the joined rows."""
        place, parts = call_place(), [self.mine(batch, "concat") for batch in batches]
        known = dict.fromkeys(name for part in parts for name in part.sources if name not in OF_JOINED)
        every = {name for name in known if all(name in part.sources for part in parts)}
        first = parts[0].sources
        shared = {name: first[name] for name in first if name in every and is_scalar(first[name].kind)}
        names = [name for name in known if name in every and name not in shared]
        filled = self._filled(parts, known, settings, place)
        kinds = {
            name: [part.sources[name].kind for part in parts if name in part.sources]
            for name in (*names, *filled)
        }
        self.report(
            *(problem for name in kinds if (problem := column_rules.joined_kinds(name, kinds[name], place)))
        )
        makes = self._joined_axis(parts, settings, place)
        self.recorded.dropped[makes] = {
            name: DroppedColumn(
                next(part.sources[name].kind for part in parts if name in part.sources),
                place,
                _lacking(name, parts),
            )
            for name in known
            if name not in kinds and name not in shared
        }
        outputs = [Output(name, _per_row(own[0]), name) for name, own in kinds.items()]
        given = (*(["group"] if self.recorded.axes[makes].grouped else []), "part")
        outputs += [Output(name, standard_kind(name), name) for name in given]
        node = self.add(
            Op.CONCAT,
            "concat",
            parts[0].axis,
            counts=not any(self.drawn(part.axis) for part in parts),
            inputs=tuple(self._joined_inputs(parts, kinds)),
            outputs=tuple(outputs),
            settings=settings,
            makes=makes,
            place=place,
        )
        return self.batch(makes, shared | self.symbols(node).sources)

    def _joined_axis(
        self, parts: Sequence[SymbolicBatch], settings: ConcatOptions, place: Place | None
    ) -> int:
        axes, joined = self.recorded.axes, tuple(part.axis for part in parts)
        grouped = all(axes[axis].grouped for axis in joined)
        if settings.groups is None:
            return self.axis(RowAxis(None, 0, grouped, "joined", joined))
        prompts = common_prompts(axes, joined)
        if prompts is None:
            self.report(column_rules.no_common_prompts(place))
        return self.axis(RowAxis(prompts, 0, True, "joined", joined))

    def _filled(
        self,
        parts: Sequence[SymbolicBatch],
        known: Collection[str],
        settings: ConcatOptions,
        place: Place | None,
    ) -> list[str]:
        """Return the columns that some parts have and `concat` fills for the others, and report problems."""
        filled = []
        for name, value in settings.fill:
            having = [part for part in parts if name in part.sources]
            if not having or name not in known:
                self.report(column_rules.filled_nowhere(name, known, place))
            elif len(having) < len(parts):
                kind = having[0].sources[name].kind
                problem = column_rules.unfillable(name, kind, value, place)
                self.report(*([problem] if problem else []))
                if kind is not None and kind.level is Level.TOKEN:
                    for part in parts:
                        self.find(part, "tokens", "concat")
                filled.append(name)
        return filled

    def _joined_inputs(
        self, parts: Sequence[SymbolicBatch], kinds: Mapping[str, Sequence[Kind | None]]
    ) -> Iterator[Input]:
        """Yield the inputs of a `concat` node, as ``PART.NAME``.

        A part with a column to fill also reads its ``tokens``, which say how many values each row gets.
        """
        for number, part in enumerate(parts):
            names = [name for name in kinds if name in part.sources]
            if len(names) < len(kinds) and "tokens" in part.sources:
                names = list(dict.fromkeys((*names, "tokens")))
            for name in names:
                yield Input(f"{number}.{name}", part.sources[name].column)

    def drawn(self, axis: int) -> bool:
        """Return True if some rows of an axis come from a buffer."""
        own = sources(self.recorded.axes, axis)
        return any(self.recorded.axes[each].step == "drawn" for each in own)

    def repeat(self, body: Callable[..., Any], prompts: Any, settings: dict[str, Any]) -> SymbolicBatch:
        """Record a `repeat` call, including its body's graph, and return the rows that it keeps."""
        place = call_place()
        prompts = self.mine(prompts, "repeat")
        bound = self._bound("repeat", methods.REPEAT | methods.SCHEDULE, settings, place)
        schedule = methods.schedule_of(bound)
        columns = [
            n
            for n, source in prompts.sources.items()
            if self.recorded.nodes[source.column.node].op is not Op.DATA
        ]
        if columns or prompts.axis != 0:
            self.report(repeat_rules.repeat_prompts(columns, place))
        call = self.calls
        graph, kinds = self._body_graph(body, prompts, place)
        inputs = tuple(Input(n, source.column) for n, source in (prompts.sources | self.state).items())
        rows = graph.axes[graph.rows]
        makes = self.axis(RowAxis(None, rows.samples, rows.grouped))
        outputs = tuple(Output(n, kind, n) for n, kind in kinds.items())
        node = self.add(
            Op.REPEAT,
            f"repeat.{graph.name}",
            prompts.axis,
            inputs=inputs,
            outputs=outputs,
            settings=RepeatOptions(**bound),
            makes=makes,
            body=graph,
            digest=digest(body),
            timeout=float("inf"),
            schedule=schedule,
            place=place,
            definition=definition_place(body),
        )
        self.recorded.nodes[-1] = node = replace(node, call=call)
        return self.symbols(node)

    def _body_graph(
        self, body: Callable[..., Any], prompts: SymbolicBatch, place: Place | None
    ) -> tuple[Graph, dict[str, Kind | None]]:
        """Trace the body of a `repeat`. Returns its graph, and the kinds of the columns it returns."""
        name = getattr(body, "__name__", "body")
        with self._inside(prompts) as inner:
            result = body(inner)
            if not isinstance(result, SymbolicBatch):
                raise FlowError(repeat_rules.body_result(name, result, place, definition_place(body)))
            self.mine(result, "repeat")
            chosen = repeat_rules.chosen_prompts(self.recorded.axes, result.axis)
            if "keep" not in result.sources and not chosen:
                self.report(repeat_rules.no_keep(name, list(result.sources), place, definition_place(body)))
            graph = without_unread_parts(
                Graph(
                    name,
                    tuple(self.recorded.nodes),
                    tuple(self.recorded.axes),
                    results=tuple(Input(n, source.column) for n, source in result.sources.items()),
                    rows=result.axis,
                )
            )
            replaced = self.recorded.replaced
            self.report(*repeat_rules.body_rows(self.recorded.axes, result.axis, place))
        self.report(
            *repeat_rules.body_rules(graph, place),
            *graph_rules.replaced_unread(graph, replaced),
            *graph_rules.never_read(graph, self.functions),
        )
        return graph, result.columns

    @contextlib.contextmanager
    def _inside(self, prompts: SymbolicBatch) -> Iterator[SymbolicBatch]:
        """Record the calls in the ``with`` block into a separate graph, whose data are the prompts.

        Names of nodes stay unique across both graphs.
        """
        outer, poisoned, state = self.recorded, self._poisoned, self.state
        self.recorded, self._poisoned, self.depth = RecordedGraph(), set(), self.depth + 1
        axis = self.axis(RowAxis())
        outputs = tuple(Output(name, source.kind, name) for name, source in prompts.sources.items())
        node = Node(0, Op.DATA, "prompts", axis, outputs=outputs, call=self.calls)
        self.recorded.nodes.append(node)
        self.state = self.state_columns({name: source.kind for name, source in state.items()})
        try:
            yield self.symbols(node)
        finally:
            self.recorded, self._poisoned, self.state, self.depth = outer, poisoned, state, self.depth - 1

    def _scheduled(
        self, what: str, settings: Mapping[str, Any], own: Container[str] = ()
    ) -> tuple[CallSchedule, dict[str, Any]]:
        """Return the schedule of a call and its other settings, and report problems with the schedule.

        ``own``: names of settings that the called stage itself has.
        """
        schedule, rest = methods.split_schedule(settings, own)
        return methods.schedule_of(self._bound(what, methods.SCHEDULE, schedule, call_place())), rest

    def _bound(
        self,
        what: str,
        specification: Mapping[str, Setting],
        settings: Mapping[str, Any],
        place: Place | None,
    ) -> dict[str, Any]:
        """Fill in the defaults of a method's settings, and report problems with them."""
        bound, problems = methods.checked(what, specification, settings, place)
        self.report(*problems)
        return bound

    def _model_inputs(
        self, batch: SymbolicBatch, what: str, optional: tuple[str, ...], more: tuple[str, ...] = ()
    ) -> tuple[Input, ...]:
        """Return the inputs of a call of a model. No note is made of ``optional`` columns that are absent.

        ``more``: other columns that the call needs.
        """
        needs = [ColumnParameter(name, standard_kind(name), False) for name in (*methods.MODEL_READS, *more)]
        needs += [
            ColumnParameter(name, standard_kind(name), False) for name in optional if name in batch.sources
        ]
        self.note_dropped(batch, optional, what)
        return self.inputs(batch, needs, what, None)


def follow_up_columns(sources: Mapping[str, ColumnSource]) -> dict[str, ColumnSource]:
    """Return the columns that follow-up prompts keep, which are those with one value per row."""
    along = {name: source for name, source in sources.items() if name not in LEFT_BEHIND}
    return {
        name: ColumnSource(source.column, _per_row(source.kind))
        for name, source in along.items()
        if source.kind is None or source.kind.level not in (Level.TOKEN, Level.PROMPT)
    }


def _lacking(name: str, parts: Sequence[SymbolicBatch]) -> str:
    """Say which parts don't have a column, counted from 1 as the arguments of `concat`."""
    return listed(f"batch {number}" for number, part in enumerate(parts, 1) if name not in part.sources)


def _per_row(kind: Kind | None) -> Kind | None:
    return Kind(Level.ROW, kind.dtype) if kind is not None and kind.level is Level.GROUP else kind
