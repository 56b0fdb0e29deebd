"""The rules for what a flow keeps across iterations, with the problem for each violation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.author.memory import REDUCERS, Reducer, Table
from rlflow.compiler.graph.model import Graph, Op, all_nodes
from rlflow.errors import Place, Problem, listed, nearest

KNOWN = (*REDUCERS, "ema(rate)")


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
                remedy=f"write '{close}'" if close else f"add {column}=0.0 to table(…) in @flow(keeps=…)",
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


def read_late(what: str, name: str, written: Place | None, place: Place | None) -> Problem:
    """Return the problem of a read that stands after the write of the same table."""
    return Problem(
        "keeps-order",
        f"{what} stands after the write of '{name}', but reads what earlier iterations wrote",
        place,
        written,
        found=f"a read after {name}.write",
        expected="reads before the write, which takes effect when the iteration ends",
        remedy=f"move {what} above {name}.write",
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


def unused(graph: Graph, place: Place | None) -> Iterator[Problem]:
    """Yield a problem for each table of the flow that nothing reads, or nothing writes."""
    nodes = list(all_nodes(graph.nodes))
    for slot in graph.memory:
        ops = {node.op for node in nodes if node.memory == slot.name}
        lacking = [verb for op, verb in ((Op.READ, "reads"), (Op.WRITE, "writes")) if op not in ops]
        if lacking:
            yield Problem(
                "keeps-unused",
                f"nothing {' or '.join(lacking)} '{slot.name}' at these settings",
                place,
                found=listed(sorted(ops)) or "no call",
                expected=f"{slot.name}.read and {slot.name}.write",
                remedy=f"call {' and '.join(f'{slot.name}.{verb[:-1]}' for verb in lacking)}, or remove it from "
                "keeps",
                severity="warning",
            )
