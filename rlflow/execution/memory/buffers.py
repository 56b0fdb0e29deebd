"""Rows that a flow keeps across iterations: which rows a buffer stores, draws and evicts.

The columns of the rows stay where the engine stores them, on pools on the ranks. The driver only has one entry
per row: where the row is, when it was sampled, how often it was drawn, and the numbers that decide about it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column
from rlflow.author.columns import Kind, Level
from rlflow.author.memory import OLDEST, Buffer
from rlflow.author.node_options import DrawOptions
from rlflow.author.seeds import row_seeds, uniforms
from rlflow.execution.account import Count

if TYPE_CHECKING:
    from rlflow.execution.engine import Engine

AGE, DRAWN = "age", "drawn"  # columns that drawn rows get
OWN = ("group", AGE, DRAWN)  # columns that a buffer makes anew for drawn rows
# rows of a put are copied to a place of their own once at most this share of them is left
LEFT = 0.5


@dataclass(eq=False)
class PutRows:
    """The rows of one put, as the engine stores them. Some may have left the buffer."""

    iteration: int  # the iteration that put them
    rows: Batch  # every column has one value per row or per token
    pool: str | None  # the pool that stores them
    payload: bytes = b""  # the rows as bytes, once they were saved

    @staticmethod
    def opened(engine: Engine, iteration: int, pool: str | None, payload: bytes) -> PutRows:
        """Return the rows that were packed as ``payload``, stored by the engine again."""
        rows = engine.lasting().unpacked(payload, None, pool)
        return PutRows(iteration, rows, engine.near(rows), payload)

    def packed(self, engine: Engine) -> bytes:
        """Return the rows as bytes. They are packed only once, so later calls need no worker."""
        self.payload = self.payload or engine.packed(self.rows)
        return self.payload


@dataclass(frozen=True, eq=False)
class RowEntries:
    """What the driver knows about the stored rows, in stored order: tensors with one entry per row."""

    row: Tensor  # int64: the row's number among all rows that were ever put
    unit: Tensor  # int64: the number of its group, or of the row itself, among all that were ever put
    put: Tensor  # int64: index of its put
    place: Tensor  # int64: index among the rows of its put
    sampled: Tensor  # int64: the iteration that sampled it
    drawn: Tensor  # int64: how often it was drawn
    tokens: Tensor  # int64: its number of tokens
    numbers: Tensor  # float64 [rows, names]: values of the columns that decide about rows

    @staticmethod
    def none(names: int) -> RowEntries:
        """Return the entries of no rows, with ``names`` numbers each."""
        empty = torch.zeros(0, dtype=torch.int64)
        numbers = torch.zeros(0, names, dtype=torch.float64)
        return RowEntries(empty, empty, empty, empty, empty, empty, empty, numbers)

    def take(self, which: Tensor) -> RowEntries:
        """Return the entries at ``which``, as indices or one bool per row."""
        return RowEntries(*(getattr(self, each.name)[which] for each in fields(self)))

    def joined(self, other: RowEntries) -> RowEntries:
        """Return these entries followed by the entries of ``other``."""
        return RowEntries(
            *(torch.cat([getattr(each, item.name) for each in (self, other)]) for item in fields(self))
        )

    def __len__(self) -> int:
        return len(self.row)

    @functools.cached_property
    def slots(self) -> Tensor:
        """The index of each row's unit among the stored units, int64 [rows]."""
        slots: Tensor = torch.unique_consecutive(self.unit, return_inverse=True)[1]
        return slots

    @property
    def units(self) -> Tensor:
        """The number of each stored unit, int64 [units], ascending."""
        units: Tensor = torch.unique_consecutive(self.unit)
        return units

    def count(self) -> Count:
        """Return how many units, rows and tokens there are."""
        return Count(len(self.units), len(self), int(self.tokens.sum()))

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of each unit's ``values``, float64 [units], given float64 [rows]."""
        rows = torch.bincount(self.slots, minlength=len(self.units))
        return torch.zeros(len(rows), dtype=torch.float64).index_add_(0, self.slots, values) / rows


@dataclass(frozen=True)
class BufferTotals:
    """How many units, rows and tokens a buffer ever got, and how many left it, by cause.

    The units that were put are those that are still stored and those that left.
    """

    put: Count = field(default_factory=Count)
    age: Count = field(default_factory=Count)  # left because they were too old
    room: Count = field(default_factory=Count)  # left as the oldest of a full buffer
    choice: Count = field(default_factory=Count)  # left as the lowest of a full buffer

    def since(self, before: BufferTotals) -> BufferTotals:
        """Return what was put and what left since ``before``."""
        pairs = ((getattr(self, each.name), getattr(before, each.name)) for each in fields(self))
        return BufferTotals(*(Count(*(a - b for a, b in zip(*pair, strict=True))) for pair in pairs))

    def plus(self, **counts: Count) -> BufferTotals:
        """Return the totals with these counts added, by name."""
        return replace(self, **{name: getattr(self, name).plus(count) for name, count in counts.items()})


@dataclass(frozen=True, eq=False)
class KeptBuffer:
    """A buffer before an iteration.

    ``names``: the columns whose values the driver needs, to draw and to evict by them.
    """

    spec: Buffer
    names: tuple[str, ...] = ()
    puts: tuple[PutRows, ...] = ()
    entries: RowEntries = field(default_factory=lambda: RowEntries.none(0))
    totals: BufferTotals = field(default_factory=BufferTotals)
    rows_put: int = 0  # number of rows that were ever put
    units_put: int = 0  # number of groups, or of rows, that were ever put

    @staticmethod
    def empty(spec: Buffer, names: Sequence[str] = ()) -> KeptBuffer:
        """Return a buffer without rows. ``names``: the columns that draws use as weights or strata."""
        every = (*names, *([] if spec.evict == OLDEST else [spec.evict]))
        known = tuple(dict.fromkeys(every))
        return KeptBuffer(spec, known, entries=RowEntries.none(len(known)))

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """The size of the stored columns in bytes, wherever they are."""
        return sum(data.nbytes for put in self.puts for data in put.rows.data.values())

    def before(self, iteration: int) -> KeptBuffer:
        """Return the buffer without rows that were put in ``iteration`` or later."""
        late = [i for i, put in enumerate(self.puts) if put.iteration >= iteration]
        if not late:
            return self
        return replace(self, entries=self.entries.take(~torch.isin(self.entries.put, torch.tensor(late))))

    # -- draws

    def chosen(self, iteration: int, seed: int, options: DrawOptions) -> Tensor:
        """Return which rows a draw takes, as indices of ``entries``, int64, in stored order.

        Draws are without replacement, and depend only on ``seed`` and on the units' numbers and weights. Rows
        older than the bound, and units whose weight or stratum is 0 or NaN, are never drawn. Raises ValueError
        for a weight that is negative or infinite.
        """
        young = self._young(iteration).nonzero()[:, 0]
        entries = self.entries.take(young)
        units = entries.units
        can, keys = torch.ones(len(units), dtype=torch.bool), -units.double()
        weights = torch.ones(len(units), dtype=torch.float64)
        if options.weight is not None:
            weights = entries.means(self._numbers(entries, options.weight))
            if ((weights < 0) | weights.isinf()).any():
                bad = weights[(weights < 0) | weights.isinf()][0]
                raise ValueError(
                    f"found {bad:g} as a weight in '{options.weight}', expected finite numbers from 0 on"
                )
            can = weights > 0
        if not options.newest:
            keys = _exponentials(seed, units) / weights
        strata = torch.zeros(len(units), dtype=torch.float64)
        if options.strata is not None:
            strata = entries.means(self._numbers(entries, options.strata))
            can &= ~strata.isnan()
        taken = _first(keys, strata, can, len(units) if options.count is None else options.count)
        return young[torch.isin(entries.slots, taken)]

    def _young(self, iteration: int) -> Tensor:
        """Return bool [rows], True for rows that are not too old in ``iteration``."""
        age = iteration - self.entries.sampled
        return (
            torch.ones(len(age), dtype=torch.bool) if self.spec.max_age is None else age <= self.spec.max_age
        )

    def _numbers(self, entries: RowEntries, name: str) -> Tensor:
        return entries.numbers[:, self.names.index(name)]

    def rows(self, engine: Engine, which: Tensor, iteration: int) -> Batch:
        """Return the stored rows at ``which`` as a batch with an axis of its own.

        ``which``: indices of ``entries``, ascending. The batch has the stored columns, and the row columns
        ``age`` (iterations since the row was sampled) and ``drawn`` (how often it was drawn before), both
        int64. No values move between processes. Without rows, the batch has no stored columns.
        """
        entries = self.entries.take(which)
        pieces = [
            self.puts[put].rows.rows(entries.place[entries.put == put])
            for put in torch.unique_consecutive(entries.put).tolist()
        ]
        if not pieces:
            return Batch(Axis(torch.zeros(0, 4, dtype=torch.int64), grouped=True), {})
        axis = Axis.join([piece.axis for piece in pieces])
        own = {AGE: iteration - entries.sampled, DRAWN: entries.drawn}
        counts = {name: Data(Kind(Level.ROW, "int64"), value) for name, value in own.items()}
        group = {"group": group_column(axis)} if axis.grouped else {}
        return Batch(axis, engine.joined(pieces).data | counts | group)

    def after_draw(self, which: Tensor) -> KeptBuffer:
        """Return the buffer after a draw of the rows with these numbers (see ``RowEntries.row``)."""
        again = torch.isin(self.entries.row, which).long()
        return replace(self, entries=replace(self.entries, drawn=self.entries.drawn + again))

    # -- puts

    def after_put(self, engine: Engine, batch: Batch, iteration: int) -> KeptBuffer:
        """Return the buffer after ``iteration`` has put the rows of a batch and evicted what has to leave.

        The engine keeps the rows' columns. Rows with a column ``age`` were sampled that many iterations ago.
        """
        if not len(batch):
            return self.evicted(engine, iteration)
        needed = [name for name in dict.fromkeys((*self.names, AGE)) if name in batch]
        known = engine.per_row(engine.gather(batch.select(*needed)))
        stored = engine.per_row(batch.select(*(name for name in batch.data if name not in OWN)))
        axis = Axis(batch.axis.keys.clone(), grouped=batch.axis.grouped)
        pool = engine.near(stored)
        put = PutRows(iteration, engine.lasting().held(Batch(axis, stored.data), pool), pool)
        more = self._entries(put.rows, known, iteration)
        return replace(
            self,
            puts=(*self.puts, put),
            entries=self.entries.joined(more),
            totals=self.totals.plus(put=more.count()),
            rows_put=self.rows_put + len(more),
            units_put=self.units_put + len(more.units),
        ).evicted(engine, iteration)

    def _entries(self, rows: Batch, known: Batch, iteration: int) -> RowEntries:
        count = len(rows)
        number = torch.arange(count)
        units = rows.axis.slots if self.spec.unit == "groups" and rows.axis.grouped else number
        tokens = rows.data["tokens"].lengths if "tokens" in rows else None
        return RowEntries(
            row=number + self.rows_put,
            unit=units + self.units_put,
            put=torch.full((count,), len(self.puts)),
            place=number,
            sampled=iteration - known[AGE] if AGE in known else torch.full((count,), iteration),
            drawn=torch.zeros_like(number),
            tokens=torch.zeros_like(number) if tokens is None else tokens,
            numbers=torch.stack([known[name].double() for name in self.names], 1)
            if self.names
            else torch.zeros(count, 0, dtype=torch.float64),
        )

    def evicted(self, engine: Engine, iteration: int) -> KeptBuffer:
        """Return the buffer without the rows that leave it at the end of ``iteration``.

        First the rows leave that are too old for the next iteration. Then, as long as the buffer is too full,
        the oldest or lowest units.
        """
        young = self._young(iteration + 1)
        old, entries = self.entries.take(~young), self.entries.take(young)
        units = entries.units
        order = torch.arange(len(units))
        by_choice = self.spec.evict != OLDEST
        if by_choice:
            values = entries.means(self._numbers(entries, self.spec.evict))
            order = torch.argsort(torch.where(values.isnan(), -torch.inf, values), stable=True)
        leaves = torch.isin(entries.slots, order[: max(len(units) - self.spec.bound, 0)])
        full = entries.take(leaves).count()
        totals = self.totals.plus(age=old.count(), **{"choice" if by_choice else "room": full})
        return replace(self, entries=entries.take(~leaves), totals=totals)._compacted(engine)

    def _compacted(self, engine: Engine) -> KeptBuffer:
        """Return the buffer without puts that have no rows left.

        Rows of a put that has mostly been evicted are copied, so that the memory of the others is freed.
        """
        left = torch.bincount(self.entries.put, minlength=len(self.puts)).tolist()
        if all(count > LEFT * len(put.rows) for count, put in zip(left, self.puts, strict=True)):
            return self
        place, number = self.entries.place.clone(), torch.zeros(len(self.puts), dtype=torch.int64)
        puts: list[PutRows] = []
        for i, (count, put) in enumerate(zip(left, self.puts, strict=True)):
            number[i] = len(puts)
            if not count:
                continue
            if count <= LEFT * len(put.rows):
                own = self.entries.put == i
                part = put.rows.rows(place[own])
                axis = Axis(part.axis.keys, grouped=part.axis.grouped)
                held = engine.lasting().held(Batch(axis, part.data), put.pool)
                put, place[own] = PutRows(put.iteration, held, put.pool), torch.arange(count)
            puts.append(put)
        entries = replace(self.entries, place=place, put=number[self.entries.put])
        return replace(self, puts=tuple(puts), entries=entries)

    def on(self, engine: Engine) -> KeptBuffer:
        """Return the buffer with its rows stored anew from their bytes, after workers were lost.

        The rows must have been packed before.
        """
        puts = (PutRows.opened(engine, put.iteration, put.pool, put.payload) for put in self.puts)
        return replace(self, puts=tuple(puts))


def _exponentials(seed: int, units: Tensor) -> Tensor:
    """Return an exponentially distributed number for each unit, float64 [units], from its own seed.

    The units with the smallest numbers, each divided by its weight, are a weighted draw without replacement
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). So a draw doesn't depend on
    the order of the units.
    """
    keys = torch.stack([units, torch.zeros_like(units)], 1)
    return -torch.log1p(-uniforms(row_seeds(seed, keys), 1)[:, 0])


def _first(keys: Tensor, strata: Tensor, can: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` units with the smallest ``keys``, taking the strata in turn.

    First the best unit of each stratum, then the second best of each, and so on. ``can``: bool [units], the
    units that may be drawn. Ties go to the unit that was stored first.
    """
    order = torch.argsort(keys, stable=True)
    order = order[can[order]]
    by_stratum = order[torch.argsort(strata[order], stable=True)]
    sizes = torch.unique_consecutive(strata[by_stratum], return_counts=True)[1]
    turn = torch.arange(len(by_stratum)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    best = torch.empty(len(keys), dtype=torch.int64)
    best[by_stratum] = turn
    return order[torch.argsort(best[order], stable=True)][:count]
