"""Counts the rows of a plan by their outcome, once all its nodes are done."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.memory import Buffer
from rlflow.author.node_options import ChooseOptions
from rlflow.compiler.graph.ancestry import chosen_from, sources
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.execution.memory.buffers import BufferTotals
from rlflow.execution.tally import PartialMetrics, known
from rlflow.training.loss_rows import NO_LOSS, WITH_GROUP

MAKERS = (Op.DATA, Op.GENERATE, Op.REPEAT, Op.ENCODE, Op.DRAW)  # nodes that make rows with tokens
CAUSES = {WITH_GROUP: "with its group", NO_LOSS: "no loss has it among its rows"}


@dataclass(frozen=True)
class UpdateRows:
    """Whether an update learned from each of its rows, and if not, why."""

    # int64 [rows]: 0 if the update learned from the row. Otherwise a key of CAUSES, or the number (counted
    # from 1) of the column in ``columns`` that is not finite in this row
    broken: Tensor
    columns: tuple[str, ...]
    waits: bool = False  # the update was not executed
    stepped: bool = True  # the update took at least one step
    tokens: Tensor | None = None  # int64 [rows]: unmasked tokens of each row

    @property
    def metrics(self) -> PartialMetrics:
        """Return the metric ``left_out``, the number of rows that the update didn't learn from.

        Empty if the update wasn't executed.
        """
        return {} if self.waits else known({"left_out": float((self.broken != 0).sum())})


class RowOrigins(NamedTuple):
    """Where each row of an axis comes from: the node that sampled it, and its index among that node's rows.

    Both are int64 [rows]. ``node`` is -1 for a row that wasn't sampled.
    """

    node: Tensor
    row: Tensor

    def take(self, index: Tensor) -> RowOrigins:
        """Return the origins of the rows at ``index``."""
        return RowOrigins(self.node[index], self.row[index])


RANKS = {RowOutcome.READ: 0, RowOutcome.LEFT_OUT: 2, RowOutcome.TRAINED: 3}
# a decision with a higher rank replaces an earlier one; an update of the role that sampled the row has the
# highest rank
CHOSEN_AWAY, OWN = 1, 4


class Ledger:
    """Collects the outcomes of rows while a plan runs.

    ``axes``: this iteration's row axis for each axis of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Mapping[int, Axis],
        longest: float = math.inf,
        idle: Mapping[int, Node] = MappingProxyType({}),
    ) -> None:
        """Create a ledger without outcomes.

        ``longest``: the maximum number of tokens in a follow-up prompt. ``idle``: the nodes of the graph that
        aren't due in this iteration. Rows that only wait for their update have an outcome of their own.
        """
        self.waiting = {i: node for i, node in idle.items() if node.op is Op.UPDATE}
        nodes = tuple(self.waiting.get(node.id, node) for node in graph.nodes)
        self.graph, self.axes, self.longest = replace(graph, nodes=nodes), axes, longest
        self.updates: dict[int, UpdateRows] = {}
        # node → why each row's episode failed; empty if it didn't
        self.failed: dict[int, Sequence[str]] = {}
        # put → what it stored, and what it made leave the buffer
        self.puts: dict[int, BufferTotals] = {}
        # stage → which of its rows have tokens other than the sampled ones
        self.placed: dict[int, PlacedRows] = {}
        # `repeat` → bool [rows]: which of its rows a stage in its body put in place of sampled rows
        self.marked: dict[int, Tensor] = {}
        self._lengths: dict[int, Tensor] = {}

    def sampled(self, node: Node, rows: Batch) -> None:
        """Record the rows made by a node.

        The rows of a `repeat` may be prompts, which have no tokens.
        """
        tokens = rows.data.get("tokens")
        if tokens is not None and tokens.lengths is not None and node.op in MAKERS:
            self._lengths[node.id] = tokens.lengths
        elif node.op is Op.REPEAT:
            self._lengths[node.id] = torch.zeros(len(rows), dtype=torch.int64)

    def account(self) -> RowAccount:
        """Return the account of all rows of this graph.

        Rows returned by the body of a `repeat` aren't included: the `repeat` accounts for them.
        """
        total = RowAccount()
        every = {**{i: rows.lengths for i, rows in self.placed.items()}, **self._lengths}
        outcomes = {
            i: _RowOutcomes(lengths, self._reader(self.graph.nodes[i])) for i, lengths in every.items()
        }
        returned = self._returned(outcomes)
        for node in self.graph.nodes:
            if (
                node.op is Op.CHOOSE
                and node.makes is not None
                and node.makes in self.axes
                and self._trains(node.makes)
            ):
                self._chosen(node, outcomes)
            elif node.op is Op.ASK and node.makes in self.axes:
                self._count_too_long(node, outcomes)
            elif node.id in self.updates:
                self._updated(node, self.updates[node.id], outcomes)
            elif node.id in self.waiting and node.axis in self.axes:
                self._updated(node, None, outcomes)
        for i, lengths in self._lengths.items():
            node = self.graph.nodes[i]
            axis, gone = self.axes[node.rows_axis], returned[i]
            if bool(gone.any()) and bool(gone.all()):
                continue
            here, elsewhere = (~gone, gone) if bool(gone.any()) else (None, None)
            if node.op is Op.ENCODE:
                total.place(node.name, Count.of(axis, lengths))
            elif node.op is Op.DRAW:
                total.open(node.name, Count.of(axis, lengths))
            elif node.op is not Op.REPEAT:
                total.sample(node.name, Count.of(axis, lengths, here, elsewhere))
            for name, own, others in self._sources(node, here, elsewhere):
                outcomes[i].count(total, name, axis, own, others)
        for i, rows in self.placed.items():
            if self._learns_from(i) and bool(rows.where.any()):
                node = self.graph.nodes[i]
                total.place(node.name, Count.of(self.axes[node.rows_axis], rows.lengths, rows.where))
                outcomes[i].count(total, node.name, self.axes[node.rows_axis], rows.where)
        return total

    def store(self, total: RowAccount) -> None:
        """Add what was put into buffers to the account ``total``, and what left them.

        Only for an iteration that has ended, because others change no buffer.
        """
        specs = {slot.name: slot.spec for slot in self.graph.memory}
        for i, changes in self.puts.items():
            node = self.graph.nodes[i]
            name, spec = str(node.memory), specs[str(node.memory)]
            assert isinstance(spec, Buffer)
            total.store(name, changes.put)
            causes = {
                "too old": (changes.age, f"max_age={spec.max_age}"),
                "no room": (changes.room, f"{spec.unit}={spec.bound}"),
                "not chosen": (changes.choice, f"evict={spec.evict}"),
            }
            for cause, (count, setting) in causes.items():
                total.end(name, End(RowOutcome.EVICTED, node.name, cause, setting), count)

    def _learns_from(self, stage: int) -> bool:
        """True if an update learns from the tokens returned by the stage with the id ``stage``."""
        return any(node.op is Op.UPDATE and self._maker(node, "tokens") == stage for node in self.graph.nodes)

    def _maker(self, node: Node, parameter: str) -> int | None:
        """Return the id of the node that supplies the input ``parameter`` of ``node``, or None if none does."""
        return next((item.column.node for item in node.inputs if item.parameter == parameter), None)

    @property
    def _in_body(self) -> bool:
        return bool(self.graph.results) and not self.graph.roles

    def _sources(
        self, node: Node, here: Tensor | None, elsewhere: Tensor | None
    ) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        """Yield (name, rows, other rows) for each name that the rows of a node are counted under.

        Both masks are bool [rows]. If a stage in a `repeat` replaced some rows of a node, there are two
        names: the node that sampled and the stage.
        """
        marked = self.marked.get(node.id)
        if marked is None:
            yield source_of(node), here, elsewhere
            return
        there = torch.ones_like(marked) if here is None else here
        others = torch.zeros_like(marked) if elsewhere is None else elsewhere
        yield source_of(node), there & ~marked, elsewhere
        yield placer_of(node), there & marked, others | (there & ~marked)

    def _returned(self, outcomes: Mapping[int, _RowOutcomes]) -> dict[int, Tensor]:
        """For each node id, return bool [rows]: True for rows that a `repeat`'s body returns as sampled."""
        where = {i: torch.zeros(len(lengths), dtype=torch.bool) for i, lengths in self._lengths.items()}
        if self._in_body and self.graph.rows in self.axes:
            origins = self._with_placed(self.graph.rows, result_maker(self.graph), outcomes)
            for source, rows in where.items():
                rows[origins.row[origins.node == source]] = True
        return where

    def replaced(self) -> Tensor | None:
        """Return bool [rows], True for rows that a `repeat`'s body returns with tokens made by a stage.

        Returns None if no stage of the body returns tokens.
        """
        maker = result_maker(self.graph)
        where = (
            self.placed[maker].where
            if maker in self.placed
            else self.marked.get(maker)
            if maker is not None
            else None
        )
        index = self._index(self.graph.rows, self.graph.nodes[maker].rows_axis) if maker is not None else None
        return where[index] if where is not None and index is not None else None

    def _trains(self, axis: int) -> bool:
        """True if an update learns from rows of the axis.

        In the body of a `repeat`, the rows that it returns also count.
        """
        axes = [node.axis for node in self.graph.nodes if node.op is Op.UPDATE] + [
            self.graph.rows
        ] * self._in_body
        return any(axis in sources(self.graph.axes, learned) for learned in axes)

    def _reader(self, source: Node) -> str:
        """Return the name of the last node that reads a column of ``source``, or its own if none does."""
        later = reversed(self.graph.nodes[source.id + 1 :])
        return next(
            (node.name for node in later if any(item.column.node == source.id for item in node.inputs)),
            source.name,
        )

    def _count_too_long(self, node: Node, outcomes: Mapping[int, _RowOutcomes]) -> None:
        """Record the outcome of rows whose follow-up prompt was too long.

        Follow-up prompts that continue responses from single tokens are ignored, because a row may have none
        of them.
        """
        assert node.makes is not None
        if self.axes[node.makes].cut is None:
            end = End(RowOutcome.LEFT_OUT, node.name, "asked too long", f"data.max_prompt={self.longest:g}")
            self._end(self.origins(node.axis), self._not_in(node), outcomes, end, lambda source: CHOSEN_AWAY)

    def _not_in(self, node: Node) -> Tensor:
        """Return bool [rows], True for input rows of a node that are missing from its output."""
        assert node.makes is not None
        index, lacking = self.axes[node.makes].index, torch.ones(len(self.axes[node.axis]), dtype=torch.bool)
        if index is not None:
            lacking[index] = False
        return lacking

    def _chosen(self, node: Node, outcomes: Mapping[int, _RowOutcomes]) -> None:
        count = node.options(ChooseOptions).count
        end = End(RowOutcome.LEFT_OUT, node.name, "not chosen", f"count={count}" if count else "")
        self._end(self.origins(node.axis), self._not_in(node), outcomes, end, lambda source: CHOSEN_AWAY)

    def _updated(self, node: Node, rows: UpdateRows | None, outcomes: Mapping[int, _RowOutcomes]) -> None:
        """Record the outcomes of the rows of an update. ``rows``: None if it isn't due."""
        origins = self._with_placed(node.axis, self._maker(node, "tokens"), outcomes)
        whole = torch.ones(len(origins.row), dtype=torch.bool)

        def waiting(source: int) -> int:
            return RANKS[RowOutcome.LEFT_OUT]

        if rows is None or rows.waits:
            end = End(RowOutcome.LEFT_OUT, node.name, "the update is not due yet", str(node.schedule))
            return self._end(origins, whole, outcomes, end, waiting)
        learned = rows.broken == 0
        trained = (
            End(RowOutcome.TRAINED, node.name)
            if rows.stepped
            else End(RowOutcome.LEFT_OUT, node.name, "no step was taken")
        )
        masker = self._maker(node, "mask")
        masked = rows.tokens if masker is not None and self.graph.nodes[masker].op is Op.STAGE else None
        for source, fate in outcomes.items():
            where = learned & (origins.node == source)
            fate.set(origins.row[where], trained, self._rank(source, node, trained))
            if masked is not None and masker is not None:
                fate.mask(origins.row[where], trained, masked[where], self.graph.nodes[masker].name)
        for cause, failed in self._failed(origins):
            self._end(
                origins,
                failed & ~learned,
                outcomes,
                End(RowOutcome.LEFT_OUT, node.name, f"episode failed: {cause}"),
                waiting,
            )
        for number in torch.unique(rows.broken[~learned]).tolist():
            cause = CAUSES.get(number) or f"{rows.columns[number - 1]} is not finite"
            self._end(
                origins, rows.broken == number, outcomes, End(RowOutcome.LEFT_OUT, node.name, cause), waiting
            )

    def _with_placed(self, axis: int, maker: int | None, outcomes: Mapping[int, _RowOutcomes]) -> RowOrigins:
        """Return the origins of the rows of ``axis``, whose tokens were made by the node ``maker``.

        If a stage replaced a row's tokens, the row's origin is the stage, and the sampled row gets the
        outcome "replaced".
        """
        origins = self.origins(axis)
        index = (
            self._index(axis, self.graph.nodes[maker].rows_axis)
            if maker in self.placed and maker is not None
            else None
        )
        if index is None or maker is None:
            return origins
        gone = self.placed[maker].where[index]
        stage = self.graph.nodes[maker].name
        self._end(
            origins,
            gone,
            outcomes,
            End(RowOutcome.LEFT_OUT, stage, "replaced"),
            lambda source: RANKS[RowOutcome.LEFT_OUT],
        )
        return RowOrigins(torch.where(gone, maker, origins.node), torch.where(gone, index, origins.row))

    def _index(self, axis: int, origin: int) -> Tensor | None:
        """Return the index of each row of ``axis`` in the axis ``origin``, int64 [rows].

        Returns None if the rows of ``axis`` weren't chosen from ``origin``.
        """
        index = torch.arange(len(self.axes[axis]))
        for step in chosen_from(self.graph.axes, axis):
            if step == origin:
                return index
            chosen = self.axes[step].index
            if chosen is None:
                return None
            index = chosen[index]
        return None

    def _failed(self, origins: RowOrigins) -> Iterator[tuple[str, Tensor]]:
        """For each cause of failed episodes, yield (cause, bool [rows])."""
        for source, causes in self.failed.items():
            own = origins.node == source
            for cause in sorted(set(filter(None, causes))):
                where = torch.zeros(len(own), dtype=torch.bool)
                where[own] = torch.tensor([each == cause for each in causes])[origins.row[own]]
                yield cause, where

    def _rank(self, source: int, node: Node, end: End) -> int:
        own = end.fate is RowOutcome.TRAINED and node.role in sampler_of(self.graph.nodes[source])
        return OWN if own else RANKS[end.fate]

    def _end(
        self, origins: RowOrigins, where: Tensor, outcomes: Mapping[int, _RowOutcomes], end: End, rank: Any
    ) -> None:
        for source, fate in outcomes.items():
            fate.set(origins.row[where & (origins.node == source)], end, rank(source))

    def not_drawn(self, axis: int) -> Tensor | None:
        """Return the indices of the rows of an axis that don't come from a buffer, or None if all don't."""
        own = sources(self.graph.axes, axis)
        draws = [node.id for node in self.graph.nodes if node.op is Op.DRAW and node.makes in own]
        if not draws:
            return None
        return (~torch.isin(self.origins(axis).node, torch.tensor(draws))).nonzero()[:, 0]

    def origins(self, axis: int) -> RowOrigins:
        """Return the origins of the rows of an axis."""
        entry, real = self.graph.axes[axis], self.axes[axis]
        if entry.parts:
            parts = [self.origins(part) for part in entry.parts]
            joined = RowOrigins(
                torch.cat([part.node for part in parts]), torch.cat([part.row for part in parts])
            )
            if entry.parent is None:
                return joined
            by_prompts = Axis.join_groups([self.axes[part] for part in entry.parts])
            assert by_prompts is not None
            return joined.take(by_prompts[1])
        if entry.step == "chosen" and entry.parent is not None:
            assert real.index is not None
            return self.origins(entry.parent).take(real.index)
        maker = next(
            (node.id for node in self.graph.nodes if node.rows_axis == axis and node.id in self._lengths), -1
        )
        return RowOrigins(torch.full((len(real),), maker), torch.arange(len(real)))


@dataclass(frozen=True)
class PlacedRows:
    """The rows that a stage returned with tokens other than the sampled ones."""

    where: Tensor  # bool [rows]: the stage changed the tokens of the row
    lengths: Tensor  # int64 [rows]: tokens of each row


class _RowOutcomes:
    """The outcome of each row sampled by a node, as an index into ``ends``, and its rank.

    An outcome replaces another only if its rank is higher.
    """

    def __init__(self, lengths: Tensor, reader: str) -> None:
        """Start with the outcome "read only", by the node ``reader``, for every row.

        lengths: int64 [rows], tokens of each row.
        """
        self.ends, self.lengths, self.tokens = [End(RowOutcome.READ, reader)], lengths, lengths.clone()
        self.end = torch.zeros(len(lengths), dtype=torch.int64)
        self.rank = torch.zeros(len(lengths), dtype=torch.int64)
        # outcome of an update that trained → the stage that returned its mask
        self.maskers: dict[End, str] = {}

    def mask(self, rows: Tensor, end: End, tokens: Tensor, stage: str) -> None:
        """Record how many tokens of each row had the outcome ``end``. ``stage`` masked out the others.

        tokens: int64, one number for each of ``rows``.
        """
        own = self.end[rows] == self.ends.index(end)
        self.tokens[rows[own]] = tokens[own]
        self.maskers[end] = stage

    def count(
        self, total: RowAccount, name: str, axis: Axis, here: Tensor | None, elsewhere: Tensor | None = None
    ) -> None:
        """Add the outcomes of the rows to the account ``total``, under ``name``.

        here: bool [rows], the rows to count; None counts all rows. ``elsewhere``: as in ``Count.of``.
        """
        for number, end in enumerate(self.ends):
            ended = self.end == number if here is None else here & (self.end == number)
            total.end(name, end, Count.of(axis, self.tokens, ended, elsewhere))
            if masked := int((self.lengths - self.tokens)[ended].sum()):
                total.end(name, End(RowOutcome.LEFT_OUT, self.maskers[end], "masked"), Count(0, 0, masked))

    def set(self, rows: Tensor, end: End, rank: int) -> None:
        """Set the outcome of ``rows``, unless they already have one of this rank or higher."""
        rows = rows[self.rank[rows] < rank]
        if end not in self.ends:
            self.ends.append(end)
        self.end[rows], self.rank[rows] = self.ends.index(end), rank
        self.tokens[rows] = self.lengths[rows]


def source_of(node: Node) -> str:
    """Return the name that the rows of a node are counted under.

    For a `repeat`, this is the node in its body that samples the returned rows. For any other node, it is the
    node's own name.
    """
    if node.body is None:
        return node.name
    inner = sources(node.body.axes, node.body.rows)
    return next(
        (source_of(maker) for maker in node.body.nodes if maker.makes in inner and maker.op is Op.GENERATE),
        node.name,
    )


def placer_of(node: Node) -> str:
    """Return the stage in a `repeat`'s body that made the returned tokens, or "" if they are as sampled."""
    maker = result_maker(node.body) if node.body is not None else None
    if node.body is None or maker is None:
        return ""
    inner = node.body.nodes[maker]
    return inner.name if inner.op is Op.STAGE else placer_of(inner)


def result_maker(graph: Graph) -> int | None:
    """Return the id of the node that makes the tokens of a graph's results, or None without tokens."""
    return next((item.column.node for item in graph.results if item.parameter == "tokens"), None)


def sampler_of(node: Node) -> frozenset[str]:
    """Return the roles that sampled the rows of a node."""
    if node.body is None:
        return frozenset({node.role} if node.op is Op.GENERATE and node.role else ())
    return frozenset().union(*(sampler_of(inner) for inner in node.body.nodes))
