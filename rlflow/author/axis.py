"""Axis: the rows of a batch, the path by which each came to be, and the groups that follow from it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class AskedTokens(NamedTuple):
    """The tokens that rows were asked for: before which token of its row each goes on (int64 [rows]), and how
    many tokens each of the rows that asked has (int64)."""

    place: Tensor
    lengths: Tensor

    def take(self, index: Tensor) -> AskedTokens:
        """The tokens of some of the asked rows."""
        return AskedTokens(self.place[index], self.lengths)


@dataclass(frozen=True, eq=False)
class Axis:
    """The rows of a batch. Two batches have the same rows when they have the same Axis object."""

    # int64 [rows, 2 or more], the path of each row: (position in the data stream, sample number), and for
    # rows that were asked or joined two more numbers each time: the number of the group along the axis that
    # asking or joining made, and the row's number within the group. Seeds, groups and order follow from it.
    keys: Tensor
    parent: Axis | None = None  # the axis that the rows came from
    index: Tensor | None = None  # int64 [rows], which of its rows each came from
    grouped: bool = False  # whether rows that differ in the last number of their keys alone form a group
    # how they came from there: as they are, sampled from it, or asked
    step: Literal["taken", "sampled", "asked"] = "taken"
    cut: AskedTokens | None = None  # of rows that were asked for single tokens, for which

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def slots(self) -> Tensor:
        """int64 [rows]: the number of the group each row belongs to, counted from 0 along the axis."""
        if len(self) == 0:
            return torch.zeros(0, dtype=torch.int64)
        return starts(self.keys).long().cumsum(0) - 1

    @functools.cached_property
    def heads(self) -> Tensor:
        """int64 [groups]: the first row of each group."""
        return torch.searchsorted(self.slots, torch.arange(self.groups))

    @property
    def group_numbers(self) -> Tensor:
        """int64 [rows]: the column ``group``: the position of the prompt, of asked or joined rows the group's
        number along their axis."""
        return self.keys[:, -2].clone()

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.slots[-1]) + 1 if len(self) else 0

    @staticmethod
    def fresh(rows: int, start: int = 0) -> Axis:
        """Rows at consecutive positions of the data stream."""
        return Axis(torch.stack([torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.int64)], 1))

    def take(self, index: Tensor) -> Axis:
        """The axis of some of the rows. ``index``: int64 [rows kept]."""
        return Axis(self.keys[index], self, index, self.grouped)

    def repeat(self, times: int) -> Axis:
        """``times`` adjacent rows for each row, as samples 0 … times-1 of its position."""
        index = torch.arange(len(self)).repeat_interleave(times)
        sample = torch.arange(times).repeat(len(self)) + self.keys[index, -1] * times
        return Axis(torch.cat([self.keys[index, :-1], sample[:, None]], 1), self, index, True, "sampled")

    def ask(self, index: Tensor, cut: AskedTokens | None = None) -> Axis:
        """A prompt for each of the rows at ``index``, in that order, numbered along the new axis."""
        number = torch.arange(len(index))
        keys = torch.cat([self.keys[index], torch.stack([number, torch.zeros_like(number)], 1)], 1)
        return Axis(keys, self, index, False, "asked", cut)

    def cut_of(self, other: Axis) -> Axis | None:
        """The axis in the history of this one whose rows were asked for single tokens of ``other``, or of
        what that was taken from."""
        return next(
            (
                step
                for step in self.line
                if step.cut is not None and step.parent is not None and other.took_from(step.parent)
            ),
            None,
        )

    @staticmethod
    def join(parts: Sequence[Axis]) -> Axis:
        """The rows of the parts, one part after another. Groups of different parts stay apart, and are
        numbered along the new axis."""
        paths = stacked([part.keys for part in parts])
        before = itertools.accumulate((part.groups for part in parts), initial=0)
        number = torch.cat([part.slots + start for part, start in zip(parts, before, strict=False)])
        within = torch.cat([torch.arange(len(part)) - part.heads[part.slots] for part in parts])
        return Axis(
            torch.cat([paths, torch.stack([number, within], 1)], 1),
            grouped=all(part.grouped for part in parts),
        )

    @property
    def line(self) -> Iterator[Axis]:
        """This axis and those that it came from, the nearest first."""
        step: Axis | None = self
        while step is not None:
            yield step
            step = step.parent

    def rows_of(self, other: Axis) -> Tensor | None:
        """The row of this axis whose columns each row of ``other`` may read, int64 [rows of other], -1 where
        a row has none; None where the axes are unrelated, or where several rows of this axis belong to one of
        the other.

        An axis is related to the axes that were made from it, to the axes that it was made from, and to axes
        that were made from the same one."""
        rows = self._meets(other)
        return None if rows is None else rows[0] if rows[1] is None else _through(rows[1], rows[2], rows[0])

    def groups_of(self, other: Axis) -> Tensor | None:
        """The groups of this axis that each row of ``other`` may read: slots, int64 [rows of other], -1 where
        a row has none; None where the axes are unrelated, or where several groups belong to one row."""
        rows = self._meets(other)
        if rows is None:
            return None
        return self.slots[rows[0]] if rows[1] is None else _through(rows[1][self.heads], rows[2], rows[0])

    def _meets(self, other: Axis) -> tuple[Tensor, Tensor | None, int] | None:
        """The nearest axis that both came from: its row for each row of ``other``, and for each of this axis
        (None: it is this axis); and how many rows it has."""
        own = dict(zip(map(id, self.line), self.line, strict=True))
        index = torch.arange(len(other))
        for step in other.line:
            if step is self:
                return index, None, len(self)
            if id(step) in own:
                return index, self.back_to(step), len(step)
            index = step.index[index] if step.index is not None else index
        return None

    def back_to(self, origin: Axis) -> Tensor:
        """int64 [rows]: the row of ``origin``, which this axis came from, that each row came from."""
        index = torch.arange(len(self))
        for step in itertools.takewhile(lambda step: step is not origin, self.line):
            assert step.index is not None
            index = step.index[index]
        return index

    def took_from(self, origin: Axis) -> bool:
        """Whether the rows are rows of ``origin`` as they are."""
        between = list(itertools.takewhile(lambda step: step is not origin, self.line))
        return (
            all(step.step == "taken" for step in between)
            and (between[-1].parent if between else self) is origin
        )


def _through(origin: Tensor, rows: int, wanted: Tensor) -> Tensor | None:
    """int64 [wanted]: which entry came from each wanted row of ``rows``, -1 for none; None where several came
    from one."""
    if len(torch.unique(origin)) < len(origin):
        return None
    return torch.full((rows,), -1, dtype=torch.int64).index_put_((origin,), torch.arange(len(origin)))[wanted]


def stacked(keys: Sequence[Tensor]) -> Tensor:
    """Paths one after another, shorter ones filled up with zeros."""
    width = max(part.shape[1] for part in keys)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in keys])


def starts(keys: Tensor) -> Tensor:
    """bool [rows]: where a group begins: where a row's last number but one differs from that of the row
    before. The numbers before that may differ within a group, since rows that were joined keep the paths that
    they had."""
    first = torch.ones(len(keys), dtype=torch.bool)
    first[1:] = keys[1:, -2] != keys[:-1, -2]
    return first
