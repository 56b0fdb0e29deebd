"""The files that a run writes along the way.

Metrics, samples and the timeline are logs, to which lines are appended. Small files are replaced as a whole.
The timeline uses Chrome's trace event format.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.author.figures import Figure
from rlflow.checkpoints import durable
from rlflow.checkpoints.logs import Keep, Log, as_object
from rlflow.compiler.passes.queues import KINDS
from rlflow.compiler.spans import TICK, RankSpan, Span
from rlflow.execution.account import RowAccount
from rlflow.execution.iteration_outcome import Outcome
from rlflow.monitoring import keys
from rlflow.monitoring.keys import Figures
from rlflow.runs.directory import FILE, Printed
from rlflow.runs.evaluate import KeepAnswers
from rlflow.runs.final import answer_file, name_of

Event = dict[str, Any]
RANKS = 16  # maximum ranks of a pool that are shown
ROWS = 100  # row numbers of a queue or rank; nodes that overlap need several rows


class Timeline:
    """Turns spans into trace events.

    ``pools``: the names of the pools. Queues that don't belong to a pool are shown under this process.
    """

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._processes = {name: number for number, name in enumerate(("", *pools), 1)}
        self._queues: dict[str, int] = {}
        self._ends: dict[int, list[float]] = {}
        self._named: set[str | int] = set()  # pools and rows whose names were written
        self._origin: float | None = None

    def events(
        self, iteration: int, spans: Sequence[Span], ranks: Sequence[RankSpan] = ()
    ) -> Iterator[Event]:
        """Yield a trace event for each node, and for each rank's part in a node.

        The first event in each row of the timeline is preceded by one with the row's name. ``spans``: when
        each node ran. ``ranks``: when each rank worked on a node.
        """
        if self._origin is None:
            self._origin = min(
                (*(span.start for span in spans), *(part.start for part in ranks)), default=0.0
            )
        for span in sorted(spans, key=lambda span: span.start):
            pool, number, name = self._of_queue(span.lane)
            yield from self._shown(
                span,
                pool,
                number,
                name,
                span.lane,
                {"iteration": iteration, "waits for": list(span.waits_for)},
            )
        for part in sorted((part for part in ranks if part.rank < RANKS), key=lambda part: part.start):
            number = len(KINDS) + part.rank
            yield from self._shown(
                part,
                part.pool,
                number,
                f"rank {part.rank}",
                "rank",
                {"iteration": part.iteration, "op": part.op},
            )

    def _of_queue(self, lane: str) -> tuple[str, int, str]:
        """Return a queue's pool, number and name."""
        pool, _, kind = lane.partition(".")
        if pool in self._processes and kind in KINDS:
            return pool, [*KINDS].index(kind), KINDS[kind]
        return "", self._queues.setdefault(lane, len(self._queues)), lane

    def _shown(
        self, span: Span | RankSpan, pool: str, number: int, name: str, category: str, args: Event
    ) -> Iterator[Event]:
        process = self._processes[pool]
        first = (process * (len(KINDS) + RANKS) + number) * ROWS
        row = self._row(first, span)
        if row not in self._named:
            yield from self._names(
                process, pool, row, name if row == first else f"{name} ({row - first + 1})"
            )
        start, length = (span.start - (self._origin or 0.0)) * 1e6, (span.end - span.start) * 1e6
        yield {
            "name": span.node,
            "cat": category,
            "ph": "X",
            "ts": round(start, 1),
            "dur": round(length, 1),
            "pid": process,
            "tid": row,
            "args": args,
        }

    def _row(self, first: int, span: Span | RankSpan) -> int:
        """Return the first of the queue's rows in the timeline that is free when the span starts."""
        ends = self._ends.setdefault(first, [])
        place = next((place for place, end in enumerate(ends) if end <= span.start + TICK), len(ends))
        ends[place : place + 1] = [span.end]
        return first + place

    def _names(self, process: int, pool: str, row: int, name: str) -> Iterator[Event]:
        if pool not in self._named:
            yield {
                "name": "process_name",
                "ph": "M",
                "pid": process,
                "args": {"name": f"pool {pool}" if pool else "rlflow"},
            }
            yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        self._named |= {pool, row}
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
        yield {
            "name": "thread_sort_index",
            "ph": "M",
            "pid": process,
            "tid": row,
            "args": {"sort_index": row},
        }


TRAFFIC = "traffic.jsonl"
# written first, so that every later line can start with a comma
FIRST_EVENT = {"name": "process_labels", "ph": "M", "pid": 1, "args": {"labels": "rlflow"}}


class Records:
    """Writes those files of a run that people and tools read. None of them is needed to resume the run.

    If the disk is full, the run goes on. The error is reported once, and lines are kept in memory, up to a
    limit, and written later.
    """

    def __init__(
        self,
        folder: Path,
        start: int = 0,
        say: Callable[[str], None] = lambda text: None,
        pools: Iterable[str] = (),
        *,
        evaluated: bool = True,
    ) -> None:
        """Open the files of the run in ``folder``.

        ``start``: the first iteration. Lines that an earlier process wrote about this and later iterations
        are removed, except, with ``evaluated``, for an evaluation after ``start`` iterations. ``say``: called
        with messages. ``pools``: the run's pools.
        """
        self.folder, self._say, self._said = folder, say, False
        self.named = keys.FigureNames(keys.read(folder))
        self._metrics = self._log("metrics.jsonl", start, evaluated)
        self._samples = self._log("samples.jsonl", start, evaluated)
        self._outcomes = self._log("fates.jsonl", start, evaluated)
        self._traffic = self._log(TRAFFIC, start, evaluated)
        name = f"timeline-{start}.json" if start else "timeline.json"
        self._timeline = Log(folder / name, self._failing(name), nothing)
        self.rewards = Printed(folder, self._failing(FILE))
        self._events = 0
        self._rows = Timeline(pools)
        self._written: dict[str, bytes] = {}  # small files with their last written content
        self._unwritten: dict[str, bytes] = {}  # small files that could not be written yet

    def _log(self, name: str, start: int, evaluated: bool) -> Log:
        return Log(self.folder / name, self._failing(name), before(start, evaluated, self.named.table))

    def back_to(self, iteration: int) -> None:
        """Remove the lines of an iteration and all later ones, because these iterations are repeated."""
        for log in (self._metrics, self._samples, self._outcomes, self._traffic):
            log.keep_only(before(iteration, table=self.named.table))
        self._timeline.keep_only(lambda line: of_event(line) < iteration)

    def metrics(self, iteration: int, figures: Figures) -> dict[str, float]:
        """Add a line to metrics.jsonl, and return the metrics under their names in that file.

        Numbers that aren't finite are written as null.
        """
        known = len(self.named.table)
        values = {self.named.of(figure): value for figure, value in figures.items()}
        if len(self.named.table) > known:
            self.whole(keys.FILE, self.named.packed(), flush=False)  # before the line that needs it
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
        self._metrics.add(json.dumps({"iteration": iteration, **finite}) + "\n")
        return values

    def samples(self, iteration: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to samples.jsonl, one per line.

        Columns are sorted, because their order varies between processes.
        """
        self._samples.add(
            "".join(json.dumps({"iteration": iteration, **dict(sorted(row.items()))}) + "\n" for row in rows)
        )

    def account(self, iteration: int, account: RowAccount | None) -> None:
        """Add an iteration's row accounting to fates.jsonl, unless it is None."""
        if account is not None:
            self._outcomes.add(json.dumps({"iteration": iteration, **account.as_json()}) + "\n")

    def traffic(self, iteration: int, sizes: Mapping[str, int]) -> None:
        """Record in traffic.jsonl how many bytes an iteration or evaluation moved between processes.

        ``sizes``: bytes by kind of data. If it is empty, as it is without pools, nothing is written.
        """
        if sizes:
            self._traffic.add(json.dumps({"iteration": iteration, **sizes}) + "\n")

    def timeline(self, iteration: int, outcome: Outcome) -> None:
        """Write an iteration's trace events, one per line, for Perfetto or chrome://tracing."""
        lines = [] if self._events else [f"[{json.dumps(FIRST_EVENT)}\n"]
        lines += [
            f",{json.dumps(event)}\n" for event in self._rows.events(iteration, outcome.spans, outcome.ranks)
        ]
        self._events += len(lines)
        self._timeline.add("".join(lines))

    @contextlib.contextmanager
    def evaluation(self, iteration: int) -> Iterator[KeepAnswers]:
        """Return a context whose value is a function that writes an evaluation's answers to a file.

        ``iteration``: how many iterations have run before the evaluation.
        """
        name = name_of(iteration)
        with answer_file(self.folder / name, self._failing(name)) as keep:
            yield keep

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write held-out prompts, with the model's answers before and after training, to answers.jsonl."""
        self.whole("answers.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def bounds(self, words: str, values: Mapping[str, Any]) -> None:
        """Write what limited the run's speed: ``words`` to bounds.txt and ``values`` to bounds.json."""
        for name, text in (("bounds.txt", words), ("bounds.json", json.dumps(values, indent=1))):
            self.whole(name, f"{text}\n".encode())

    def weights(self, moved: Mapping[str, Any]) -> None:
        """Write metrics about weight transfers and offloaded parts of models to weights.json."""
        # the next iteration writes it again
        self.whole("weights.json", f"{json.dumps(moved, indent=1)}\n".encode(), flush=False)

    def whole(self, name: str, data: bytes, anew: bool = False, flush: bool = True) -> None:
        """Replace a small file if its content has changed or ``anew`` is true.

        If this fails, it is tried again before each checkpoint. ``flush``: whether to wait until the file is
        on disk.
        """
        if self._written.get(name) == data and not anew:
            return
        try:
            durable.replace(self.folder / name, data, flush=flush)
            self._written[name] = data
            self._unwritten.pop(name, None)
        except OSError as error:
            self._unwritten[name] = data
            self._complain(name, error)

    def flush(self) -> None:
        """Flush all lines to disk, before a checkpoint refers to them. Any thread may call this."""
        for name, data in list(self._unwritten.items()):
            self.whole(name, data)
        for log in (self._metrics, self._samples, self._outcomes, self._traffic, self._timeline):
            log.flush()

    def close(self) -> None:
        """Write any lines still in memory, and close all files."""
        if self._events:
            self._timeline.add("]\n")
        for log in (self._metrics, self._samples, self._outcomes, self._traffic, self._timeline):
            log.close()

    def _failing(self, name: str) -> Callable[[OSError], None]:
        return lambda error: self._complain(name, error)

    def _complain(self, name: str, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._say(f"{name} cannot be written: {error.strerror}; the run continues")


def before(start: int, evaluated: bool = True, table: Mapping[str, Figure] = MappingProxyType({})) -> Keep:
    """Return a filter that keeps lines from iterations before ``start``, and lines that can't be parsed.

    ``evaluated``: whether to also keep the evaluation after ``start`` iterations. ``table``: the kind of each
    metric, by name.
    """

    def keep(line: bytes) -> bool:
        values = as_object(line) or {}
        number = values.get("iteration")
        if not isinstance(number, int):
            return True
        # an evaluation after n iterations comes before iteration n
        judged = keys.is_evaluation(table, values)
        return number < start + (judged and evaluated)

    return keep


def nothing(line: bytes) -> bool:
    """Drop every line from an earlier process: a filter for `Log`."""
    return False


def of_event(line: bytes) -> int:
    """Return the iteration of a line in the timeline, or -1 if it has none."""
    args = (as_object(line.strip(b"[,\n")) or {}).get("args")
    number = args.get("iteration") if isinstance(args, dict) else None
    return number if isinstance(number, int) else -1
