"""The rules for what a flow keeps across iterations, with the problem for each violation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlflow.author.columns import Kind, Level, standard_kind
from rlflow.author.memory import OLDEST, REDUCERS, Buffer, Reducer, Table
from rlflow.author.node_options import DrawOptions
from rlflow.compiler.graph.model import Graph, MemorySlot, Node, Op, all_nodes
from rlflow.compiler.trace.graph_recorder import StoredColumns
from rlflow.errors import Place, Problem, listed, nearest

SCHEDULE = ("every", "after")  # settings of calls that have a schedule; calls of tables have none
KNOWN = (*REDUCERS, "ema(rate)")
VERBS = {Op.READ: "reads", Op.WRITE: "writes"}
NEEDED = ("prompt_tokens", "tokens", "mask")  # columns that rows must have to be put into a buffer
# columns that a buffer stores whenever the rows have them
STORED = (
    *NEEDED,
    "finish",
    "temperature",
    "scores",
    "sampled_logprobs",
    "policy_version",
    "prompt_id",
)
DRAWN = {name: Kind(Level.ROW, "int64") for name in ("age", "drawn")}  # columns that only drawn rows have
# what draws give if the flow puts nothing into the buffer
NOTHING_PUT = StoredColumns({name: standard_kind(name) for name in STORED if name != "prompt_id"})


def reducer_of(value: Any) -> Reducer:
    """Return the reducer that a `write` call names. The value must have passed ``write_problems``."""
    return value if isinstance(value, Reducer) else REDUCERS[value]


def reason(what: str, stale_ok: Any, place: Place | None) -> Iterator[Problem]:
    """Yield the problem of a ``stale_ok`` that gives no reason. ``what`` names the call."""
    if stale_ok is not None and (not isinstance(stale_ok, str) or not stale_ok.strip()):
        yield Problem(
            "keeps-stale",
            f"{what} gives no reason why it may read old numbers",
            place,
            found=f"stale_ok={stale_ok!r}",
            expected="a reason, as text",
            remedy='write stale_ok="…" with the reason, or leave it out',
        )


def write_problems(
    what: str, name: str, spec: Table, reducers: Mapping[str, Any], place: Place | None
) -> Iterator[Problem]:
    """Yield the problems of a write with these reducers to the table ``name``."""
    columns = [column for column, _ in spec.columns]
    if not reducers:
        yield Problem(
            "keeps-nothing",
            f"{what} writes no column",
            place,
            found=f"{what}(batch)",
            expected=f"a reducer for {listed(columns)}",
            remedy=f'write {what}(batch, {columns[0]}="add")',
        )
    for column, reducer in reducers.items():
        if column not in columns:
            close = nearest(column, columns)
            yield Problem(
                "keeps-column",
                f"table '{name}' has no column '{column}'",
                place,
                found=column,
                expected=f"one of {listed(columns)}",
                nearest=close,
                remedy=f"write '{close}'"
                if close
                else "leave it out: the call is due where its rows are"
                if column in SCHEDULE
                else f"add {column}=0.0 to table(…) in @flow(keeps=…)",
            )
        if not isinstance(reducer, Reducer) and reducer not in REDUCERS:
            close = nearest(reducer, REDUCERS) if isinstance(reducer, str) else None
            yield Problem(
                "keeps-reducer",
                f"{what} does not know how to combine the numbers of '{column}'",
                place,
                found=f"{column}={reducer!r}",
                expected=f"one of {listed(KNOWN)}",
                nearest=close,
                remedy=f"write {column}={close or 'add'!r}",
            )


def read_late(
    what: str, name: str, written: Place | None, place: Place | None, writer: str = "write"
) -> Problem:
    """Return the problem of a read or draw that stands after the write or put (``writer``)."""
    return Problem(
        "keeps-order",
        f"{what} stands after the {writer} of '{name}', but reads what earlier iterations wrote",
        place,
        written,
        found=f"{what} after {name}.{writer}",
        expected=f"reads before the {writer}, which takes effect when the iteration ends",
        remedy=f"move {what} above {name}.{writer}",
    )


def draw_problems(
    what: str, spec: Buffer, count: Mapping[str, Any], options: DrawOptions, place: Place | None
) -> Iterator[Problem]:
    """Yield the problems with the settings of a draw. ``count``: what it gives as ``groups`` and ``rows``."""
    given = {name: value for name, value in count.items() if value is not None}
    other = next((name for name in given if name != spec.unit), None)
    if other is not None:
        yield Problem(
            "keeps-draw",
            f"{what} counts {other}, but the buffer is bounded by {spec.unit}",
            place,
            found=f"{what}({other}={given[other]!r})",
            expected=f"{spec.unit}=…, or nothing to draw all",
            remedy=f"write {what}({spec.unit}={given[other]!r}), or declare buffer({other}=…)",
        )
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            yield Problem(
                "keeps-draw",
                f"{what} draws a whole number of {name}",
                place,
                found=f"{name}={value!r}",
                expected="0 or more",
                remedy=f"write {what}({name}=8), or leave {name} out to draw all",
            )
    for name, value in (("weight", options.weight), ("strata", options.strata)):
        if value is not None and not isinstance(value, str):
            yield Problem(
                "keeps-draw",
                f"{what} needs the name of a stored column for {name}",
                place,
                found=f"{name}={value!r}",
                expected="a name, as text",
                remedy=f'write {name}="scores"',
            )


def also_problems(what: str, also: Any, place: Place | None) -> Iterator[Problem]:
    """Yield the problem of a put whose ``also`` isn't a tuple of names."""
    if isinstance(also, str) or not isinstance(also, Sequence) or not all(isinstance(n, str) for n in also):
        yield Problem(
            "keeps-also",
            f"{what} needs the names of the columns that it stores also",
            place,
            found=f"also={also!r}",
            expected="a tuple of names",
            remedy=f"write also=({also!r},)" if isinstance(also, str) else 'write also=("spread",)',
        )


def drawn_again(what: str, place: Place | None) -> Problem:
    """Return the problem of a draw inside a `repeat`."""
    return Problem(
        "keeps-drawn",
        f"{what} stands in the body of a `repeat`, where each try would draw the same rows",
        place,
        found="a draw in the body",
        expected="one draw before or after the `repeat`",
        remedy=f"move {what} out of the body",
    )


def no_groups(what: str, place: Place | None) -> Problem:
    """Return the problem of a put of rows without groups into a buffer of groups."""
    return Problem(
        "keeps-groups",
        f"{what} puts rows without groups into a buffer of groups",
        place,
        found="rows without groups",
        expected="rows that a role sampled",
        remedy="declare buffer(rows=…)",
    )


def buffer_problems(graph: Graph) -> Iterator[Problem]:
    """Yield a problem for each draw, and each buffer, that decides by a column which is not stored."""
    nodes = list(all_nodes(graph.nodes))
    for slot in graph.memory:
        put = next((node for node in nodes if node.op is Op.PUT and node.memory == slot.name), None)
        if isinstance(slot.spec, Buffer) and put is not None:
            draws = [node for node in nodes if node.op is Op.DRAW and node.memory == slot.name]
            yield from _not_stored(graph, slot, slot.spec, put, draws)


def _not_stored(
    graph: Graph, slot: MemorySlot, spec: Buffer, put: Node, draws: Sequence[Node]
) -> Iterator[Problem]:
    stored = {item.parameter: item.column for item in put.inputs}
    asked = [] if spec.evict == OLDEST else [(f"the buffer '{slot.name}'", spec.evict, put.place)]
    for node in draws:
        options = node.options(DrawOptions)
        names = [name for name in (options.weight, options.strata) if name is not None]
        asked += [(node.name, name, node.place) for name in names]
    for what, name, place in asked:
        kind = graph.nodes[stored[name].node].output(stored[name].name).kind if name in stored else None
        if name not in stored:
            yield Problem(
                "keeps-stored",
                f"{what} decides by '{name}', which {put.name} does not store",
                place,
                put.place,
                found=f"stored: {listed(stored)}",
                expected=f"'{name}' among them",
                nearest=nearest(name, stored),
                remedy=f"write {put.name}(batch, also=({name!r},))",
            )
        elif kind is not None and kind.level not in (Level.ROW, Level.GROUP):
            yield Problem(
                "keeps-stored",
                f"{what} decides by '{name}', which is not a number for each row or group",
                place,
                put.place,
                found=f"{name}: {kind}",
                expected="a row or group column",
                remedy="compute one in a stage, and store it with also=(…)",
            )


def written_again(what: str, name: str, written: Place | None, place: Place | None) -> Problem:
    """Return the problem of a second write of a table in one iteration, or of one inside a `repeat`."""
    inside = written is None
    return Problem(
        "keeps-written",
        f"{what} stands in the body of a `repeat`, which may run several times"
        if inside
        else f"'{name}' is written twice in an iteration",
        place,
        written,
        found="a write in the body" if inside else f"a second {what}",
        expected="one write of each table in an iteration",
        remedy=f"write the rows that the repeat returns: {name}.write(batch, …)"
        if inside
        else "write all its columns in one call, with concat(…) if the rows come from several calls, or use "
        "a table for each",
    )


def unused(graph: Graph, place: Place | None, drawn: str | None) -> Iterator[Problem]:
    """Yield a problem for each table or buffer of the flow that nothing reads, or nothing writes.

    ``drawn``: the table whose numbers the run draws prompts by, which counts as a read.
    """
    nodes = list(all_nodes(graph.nodes))
    for slot in graph.memory:
        ops = {node.op for node in nodes if node.memory == slot.name}
        ops |= {Op.READ} if slot.name == drawn else set()
        verbs = {Op.DRAW: "draws from", Op.PUT: "puts into"} if isinstance(slot.spec, Buffer) else VERBS
        lacking = [verb for op, verb in verbs.items() if op not in ops]
        calls = [f"{slot.name}.{op}" for op in verbs]
        if lacking:
            yield Problem(
                "keeps-unused",
                f"nothing {' or '.join(lacking)} '{slot.name}' at these settings",
                place,
                found=listed(sorted(ops)) or "no call",
                expected=" and ".join(calls),
                remedy=f"call {' and '.join(f'{slot.name}.{op}' for op in verbs if op not in ops)}, or remove "
                "it from keeps",
                severity="warning",
            )
