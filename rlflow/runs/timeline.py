"""When nodes ran and where, as Chrome trace events: a process for each pool, with a row for its lanes and one for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rlflow.compiler.spans import TICK, RankSpan, Span

Event = dict[str, Any]
LANES = {"": "models", "cpu": "stages", "io": "rewards"}  # of a pool, in the order in which they are shown
RANKS = 16  # of a pool that have a row
ROWS = 100  # numbers of a lane's or rank's rows: it has several where nodes of it ran at once


class Timeline:
    """``pools``: their names; what is in none of them is this process's."""

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._processes = {name: number for number, name in enumerate(("", *pools), 1)}
        self._lanes: dict[str, int] = {}
        self._ends: dict[int, list[float]] = {}
        self._named: set[str | int] = set()  # pools and rows
        self._origin: float | None = None

    def events(self, iteration: int, spans: Sequence[Span], ranks: Sequence[RankSpan] = ()) -> Iterator[Event]:
        """One per node, and one per rank for its part of it; before the first of a row its name."""
        if self._origin is None:
            self._origin = min((*(span.start for span in spans), *(part.start for part in ranks)), default=0.0)
        for span in sorted(spans, key=lambda span: span.start):
            pool, number, name = self._of_lane(span.lane)
            yield from self._shown(span, pool, number, name, span.lane, {"iteration": iteration, "waits for": list(span.waits_for)})
        for part in sorted((part for part in ranks if part.rank < RANKS), key=lambda part: part.start):
            number = len(LANES) + part.rank
            yield from self._shown(part, part.pool, number, f"rank {part.rank}", "rank", {"iteration": part.iteration, "op": part.op})

    def _of_lane(self, lane: str) -> tuple[str, int, str]:
        """Pool, number and name of a lane."""
        pool, _, kind = lane.partition(".")
        if pool in self._processes and kind in LANES:
            return pool, [*LANES].index(kind), LANES[kind]
        return "", self._lanes.setdefault(lane, len(self._lanes)), lane

    def _shown(self, span: Span | RankSpan, pool: str, number: int, name: str, category: str, args: Event) -> Iterator[Event]:
        process = self._processes[pool]
        first = (process * (len(LANES) + RANKS) + number) * ROWS
        row = self._row(first, span)
        if row not in self._named:
            yield from self._names(process, pool, row, name if row == first else f"{name} ({row - first + 1})")
        start, length = (span.start - (self._origin or 0.0)) * 1e6, (span.end - span.start) * 1e6
        yield {"name": span.node, "cat": category, "ph": "X", "ts": round(start, 1), "dur": round(length, 1), "pid": process, "tid": row,
               "args": args}

    def _row(self, first: int, span: Span | RankSpan) -> int:
        """The first row of a lane in which nothing else ran then."""
        ends = self._ends.setdefault(first, [])
        place = next((place for place, end in enumerate(ends) if end <= span.start + TICK), len(ends))
        ends[place : place + 1] = [span.end]
        return first + place

    def _names(self, process: int, pool: str, row: int, name: str) -> Iterator[Event]:
        if pool not in self._named:
            yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"pool {pool}" if pool else "rlflow"}}
            yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        self._named |= {pool, row}
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": row, "args": {"sort_index": row}}
