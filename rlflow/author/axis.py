"""Axis: the rows of a batch, the path by which each row was made, and the groups that follow from it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class FollowUpTokens(NamedTuple):
    """The tokens at which the follow-up prompts of a batch start (`ask` with ``tokens_until``).

    ``place``, int64 [follow-up prompts]: the token of the source row before which the continuation starts.
    ``lengths``, int64 [source rows]: the number of tokens of each source row.
    """

    place: Tensor
    lengths: Tensor

    def take(self, index: Tensor) -> FollowUpTokens:
        """Return the start tokens of the follow-up prompts at ``index``."""
        return FollowUpTokens(self.place[index], self.lengths)


@dataclass(frozen=True, eq=False)
class Axis:
    """The rows of a batch. Two batches have the same rows if and only if they share one Axis object."""

    # int64 [rows, 2 or more], the path of each row: (position in the data stream, sample number). Each `ask`
    # or join adds two numbers: the number of the group along the new axis, and the row's number within the
    # group. Seeds, groups and order follow from the path.
    keys: Tensor
    parent: Axis | None = None  # the axis that these rows were made from
    index: Tensor | None = None  # int64 [rows]: the row of ``parent`` that each row was made from
    grouped: bool = False  # True: rows whose keys differ only in the last number form a group
    # how the rows were made from the parent: unchanged, sampled, or as follow-up prompts
    step: Literal["taken", "sampled", "asked"] = "taken"
    cut: FollowUpTokens | None = None  # set for follow-up prompts at single tokens: which tokens

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def slots(self) -> Tensor:
        """int64 [rows]: each row's group number, counted from 0 along the axis."""
        if len(self) == 0:
            return torch.zeros(0, dtype=torch.int64)
        return starts(self.keys).long().cumsum(0) - 1

    @functools.cached_property
    def heads(self) -> Tensor:
        """int64 [groups]: the first row of each group."""
        return torch.searchsorted(self.slots, torch.arange(self.groups))

    @property
    def group_numbers(self) -> Tensor:
        """int64 [rows]: the column ``group``.

        This is the position of the prompt in the data stream. For follow-up prompts and joined rows it is the
        group's number along their axis.
        """
        return self.keys[:, -2].clone()

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.slots[-1]) + 1 if len(self) else 0

    @staticmethod
    def fresh(rows: int, start: int = 0) -> Axis:
        """Return an axis of ``rows`` rows at consecutive positions of the data stream, from ``start``."""
        return Axis(torch.stack([torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.int64)], 1))

    def take(self, index: Tensor) -> Axis:
        """The axis of the rows at ``index``, int64 [rows kept]."""
        return Axis(self.keys[index], self, index, self.grouped)

    def repeat(self, times: int) -> Axis:
        """Return an axis with ``times`` adjacent rows for each row: samples 0 … times-1 of that row."""
        index = torch.arange(len(self)).repeat_interleave(times)
        sample = torch.arange(times).repeat(len(self)) + self.keys[index, -1] * times
        return Axis(torch.cat([self.keys[index, :-1], sample[:, None]], 1), self, index, True, "sampled")

    def ask(self, index: Tensor, cut: FollowUpTokens | None = None) -> Axis:
        """Return an axis with a follow-up prompt for each row at ``index``, in that order."""
        number = torch.arange(len(index))
        keys = torch.cat([self.keys[index], torch.stack([number, torch.zeros_like(number)], 1)], 1)
        return Axis(keys, self, index, False, "asked", cut)

    def cut_of(self, other: Axis) -> Axis | None:
        """Find the axis of follow-up prompts that start at tokens of ``other``; None if there is none.

        Searches this axis and its ancestors. Follow-up prompts also count if
        they start at tokens of an axis whose rows ``other`` selects.
        """
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
        """Return an axis with the rows of all parts, one part after another.

        Groups of different parts stay separate and are numbered along the new axis.
        """
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
        """This axis, then its parent, its parent's parent, and so on."""
        step: Axis | None = self
        while step is not None:
            yield step
            step = step.parent

    def rows_of(self, other: Axis) -> Tensor | None:
        """Return the row of this axis that each row of ``other`` reads columns from, int64 [rows of other].

        Rows of ``other`` without such a row get -1. Returns None if the axes are unrelated, or if several
        rows of this axis belong to one row of ``other``. An axis is related to the axes made from it, to the
        axes it was made from, and to axes made from the same axis.
        """
        rows = self._common_origin(other)
        return None if rows is None else rows[0] if rows[1] is None else _through(rows[1], rows[2], rows[0])

    def groups_of(self, other: Axis) -> Tensor | None:
        """Return the group of this axis that each row of ``other`` reads columns from, int64 [rows of other].

        Groups are numbered as in ``slots``. Rows of ``other`` without such a group get -1. Returns None if
        the axes are unrelated, or if several groups belong to one row of ``other``.
        """
        rows = self._common_origin(other)
        if rows is None:
            return None
        return self.slots[rows[0]] if rows[1] is None else _through(rows[1][self.heads], rows[2], rows[0])

    def _common_origin(self, other: Axis) -> tuple[Tensor, Tensor | None, int] | None:
        """Find the nearest axis that both axes were made from; None if there is none.

        Returns three values: the row of that axis for each row of ``other``; the same for each row of this
        axis, or None if the found axis is this axis; and the number of rows of the found axis.
        """
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
        """int64 [rows]: the row of ``origin`` that each row was made from.

        ``origin`` must be this axis or one of its ancestors.
        """
        index = torch.arange(len(self))
        for step in itertools.takewhile(lambda step: step is not origin, self.line):
            assert step.index is not None
            index = step.index[index]
        return index

    def took_from(self, origin: Axis) -> bool:
        """Return True if this axis is ``origin`` or an unmodified selection of its rows."""
        between = list(itertools.takewhile(lambda step: step is not origin, self.line))
        return (
            all(step.step == "taken" for step in between)
            and (between[-1].parent if between else self) is origin
        )


def _through(origin: Tensor, rows: int, wanted: Tensor) -> Tensor | None:
    """int64 [wanted]: for each wanted row, the entry of ``origin`` that names it, or -1.

    ``origin`` names a row below ``rows`` in each entry. Returns None if several entries name one row.
    """
    if len(torch.unique(origin)) < len(origin):
        return None
    return torch.full((rows,), -1, dtype=torch.int64).index_put_((origin,), torch.arange(len(origin)))[wanted]


def stacked(keys: Sequence[Tensor]) -> Tensor:
    """Concatenate paths of several axes; shorter paths are filled up with zeros."""
    width = max(part.shape[1] for part in keys)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in keys])


def starts(keys: Tensor) -> Tensor:
    """bool [rows]: True for the first row of each group.

    A row begins a group if the second-to-last number of its path differs from that of the row before. Earlier
    numbers of the paths may differ within a group, because joined rows keep their paths.
    """
    first = torch.ones(len(keys), dtype=torch.bool)
    first[1:] = keys[1:, -2] != keys[:-1, -2]
    return first
