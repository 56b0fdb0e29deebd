"""What a comparison prints: the table of its cells and the verdicts, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from rlflow.bench.cells import Compiled, machine, threads, versions
from rlflow.bench.results import Row
from rlflow.bench.suite import Suite
from rlflow.bench.verdicts import Verdict
from rlflow.watch.tables import plain

HEADS = ("cell", "seeds", "iterations", "s/iteration", "processor s", "tokens", "tokens/s", "memory", "load", "{metric}", "sums")


def cells_of(row: Row) -> tuple[str, ...]:
    """A row of the table as texts."""
    failed = f"failed: {len(row.failed)}" if row.failed else ""
    return (row.name, " ".join(filter(None, [str(len(row.seeds)), failed])), str(row.iterations), number(row.seconds, 3),
            number(row.processor, 2), number(row.tokens, 0), number(row.rate, 0), "" if row.memory is None else decimal(row.memory),
            number(row.load, 1), number(row.last, 3), "close" if row.closes else "DO NOT CLOSE")  # fmt: skip


def number(value: float | None, digits: int) -> str:
    """A number with so many digits; nothing for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def heads(suite: Suite) -> tuple[str, ...]:
    """The heads of the table."""
    return tuple(head.format(metric=suite.goal.metric) for head in HEADS)


def printed(suite: Suite, rows: Sequence[Row], verdicts: Sequence[Verdict], notes: Iterable[str]) -> Iterator[RenderableType]:
    """The page for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, head in enumerate(heads(suite)):
        table.add_column(head, justify="left" if place in (0, len(HEADS) - 1) else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(plain, cells_of(row)))
    yield table
    yield from (plain(line) for line in lines(rows, verdicts, notes))


def lines(rows: Sequence[Row], verdicts: Sequence[Verdict], notes: Iterable[str]) -> Iterator[str]:
    """The sentences beneath the table."""
    for verdict in verdicts:
        pair = f"{verdict.cell} beside {verdict.base}"
        yield f"{pair}, {verdict.what}: {verdict.text.removeprefix(f'{pair}: ')}"
    for row in rows:
        yield from (f"{row.name}, seed {seed} failed: {cause}" for seed, cause in row.failed.items())
        if not row.closes:
            yield f"{row.name}: what was sampled and what became of it do not have the same sums:\n{row.fates}"
    yield from notes
    kind, known = machine(), versions()
    yield (f"on {kind['processor']}, {kind['cores']} cores, {kind['memory']}"
           + (f", {kind['accelerators']}" if kind["accelerators"] != "none" else "") + f"; {threads()['torch']} threads; "
           + ", ".join(f"{name} {known[name]}" for name in ("python", "torch", "transformers", "ray", "vllm") if name in known))


def markdown(suite: Suite, rows: Sequence[Row], verdicts: Sequence[Verdict], notes: Iterable[str]) -> str:
    """The page as Markdown."""
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    table = [line(heads(suite)), line("---" if not place else "---:" for place in range(len(HEADS)))]
    table += [line(cells_of(row)) for row in rows]
    return "\n".join([f"`rlflow bench {suite.name}`", "", *table, "", *(f"- {text}" for text in lines(rows, verdicts, notes)), ""])


def as_json(suite: Suite, cells: Sequence[Compiled], rows: Sequence[Row], verdicts: Sequence[Verdict], notes: Sequence[str]) -> str:
    """One line of JSON with everything."""
    parts = {cell.key: cell.parts for cell in cells}
    page: dict[str, Any] = {"suite": suite.name, "cells": [dataclasses.asdict(row) | {"parts": parts.get(row.key)} for row in rows],
                            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts], "notes": list(notes)}  # fmt: skip
    return json.dumps(page, default=str)
