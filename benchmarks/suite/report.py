"""Print a comparison: the tables and the verdicts, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from rlflow.benchmarks import by_seed
from rlflow.benchmarks.by_seed import CurveRow, SeedRow
from rlflow.benchmarks.cells import Compiled, machine, threads, versions
from rlflow.benchmarks.results import Row
from rlflow.benchmarks.suite import Suite
from rlflow.benchmarks.verdicts import Verdict
from rlflow.monitoring.tables import plain

Lines = Sequence[Sequence[str]]  # lines of a table, starting with its header
HEADS = (
    "cell",
    "seeds",
    "iterations",
    "s/iteration",
    "processor s",
    "tokens",
    "tokens/s",
    "moved",
    "memory",
    "load",
    "{metric}",
    "sums",
)


def cells_of(row: Row) -> tuple[str, ...]:
    """Return a cell's row of the table as strings."""
    failed = f"failed: {len(row.failed)}" if row.failed else ""
    return (
        row.name,
        " ".join(filter(None, [str(len(row.seeds)), failed])),
        str(row.iterations),
        number(row.seconds, 3),
        number(row.processor, 2),
        number(row.tokens, 0),
        number(row.rate, 0),
        size(row.moved),
        size(row.memory),
        number(row.load, 1),
        number(row.last, 3),
        "match" if row.closes else "DO NOT MATCH",
    )


def number(value: float | None, digits: int) -> str:
    """Return a number as text with ``digits`` decimals; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def size(value: float | None) -> str:
    """Return a number of bytes as text, such as 1.2 GB; empty for None."""
    return "" if value is None else decimal(round(value))


def heads(suite: Suite) -> tuple[str, ...]:
    """Return the column heads of the table of cells."""
    return tuple(head.format(metric=suite.goal.metric) for head in HEADS)


@dataclass(frozen=True)
class Learned:
    """The learning part of a page: the rows of the table of seeds, and the learning curves."""

    seeds: Sequence[SeedRow] = ()
    curves: Sequence[CurveRow] = ()

    def tables(self, suite: Suite) -> Iterator[Lines]:
        """Yield the table of seeds and the table of learning curves as strings.

        A table without rows is skipped.
        """
        if self.seeds:
            yield [
                by_seed.heads(self.seeds, suite.goal),
                *(by_seed.texts(row, suite.goal, self.seeds) for row in self.seeds),
            ]
        if self.curves:
            yield by_seed.curve_table(self.curves, suite.goal)


def tables(suite: Suite, rows: Sequence[Row], learned: Learned) -> Iterator[Lines]:
    """Yield all tables of the page as strings, the table of cells first.

    Columns without any value are dropped.
    """
    columns = [
        column
        for column in zip(heads(suite), *map(cells_of, rows), strict=True)
        if any(column[1:]) or not rows
    ]
    yield list(zip(*columns, strict=True))
    yield from learned.tables(suite)


def printed(
    suite: Suite,
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    notes: Iterable[str],
    learned: Learned = Learned(),
) -> Iterator[RenderableType]:
    """Yield the parts of the page for a terminal."""
    for first, *rest in tables(suite, rows, learned):
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for head in first:
            table.add_column(
                plain(head), justify="left" if head in ("cell", "sums") else "right", overflow="fold"
            )
        for row in rest:
            table.add_row(*map(plain, row))
        yield table
        yield ""
    yield from (plain(line) for line in lines(rows, verdicts, notes))


def lines(rows: Sequence[Row], verdicts: Sequence[Verdict], notes: Iterable[str]) -> Iterator[str]:
    """Yield the sentences below the tables."""
    for verdict in verdicts:
        pair = f"{verdict.cell} vs {verdict.base}"
        yield f"{pair}, {verdict.what}: {verdict.text.removeprefix(f'{pair}: ')}"
    for row in rows:
        yield from (f"{row.name}, seed {seed} failed: {cause}" for seed, cause in row.failed.items())
        if not row.closes:
            yield (
                f"{row.name}: the sums of sampled rows and of their outcomes do not match:\n{row.outcomes}"
            )
    yield from notes
    kind, known, count = machine(), versions(), threads()["torch"]
    yield (
        f"on {kind['processor']}, {kind['cores']} cores, {kind['memory']}"
        + (f", {kind['accelerators']}" if kind["accelerators"] != "none" else "")
        + f"; {count} thread{'' if count == '1' else 's'}; "
        + ", ".join(
            f"{name} {known[name]}"
            for name in ("python", "torch", "transformers", "ray", "vllm")
            if name in known
        )
    )


def markdown(
    suite: Suite,
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    notes: Iterable[str],
    learned: Learned = Learned(),
) -> str:
    """Return the complete page as Markdown."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    page = [f"`rlflow bench {suite.name}`", ""]
    for first, *rest in tables(suite, rows, learned):
        page += [
            line(first),
            line("---" if not place else "---:" for place in range(len(first))),
            *map(line, rest),
            "",
        ]
    return "\n".join([*page, *(f"- {text}" for text in lines(rows, verdicts, notes)), ""])


def as_json(
    suite: Suite,
    cells: Sequence[Compiled],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    notes: Sequence[str],
    learned: Learned = Learned(),
) -> str:
    """Return the complete comparison as one line of JSON."""
    parts = {cell.key: cell.parts for cell in cells}
    page: dict[str, Any] = {
        "suite": suite.name,
        "cells": [dataclasses.asdict(row) | {"parts": parts.get(row.key)} for row in rows],
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        "notes": list(notes),
        "seeds": [dataclasses.asdict(row) for row in learned.seeds],
        "curves": [dataclasses.asdict(row) for row in learned.curves],
    }
    return json.dumps(page, default=str)
