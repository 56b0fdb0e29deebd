"""Axis: the rows of a batch, which rows of other batches they came from, and their groups."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class FollowUpTokens(NamedTuple):
    """Where in their responses follow-up prompts continue (`ask` with ``tokens_until``).

    ``place``, int64 [follow-up prompts]: which token of the source row's response is the first one that isn't
    in the prompt, counted from 0. ``lengths``, int64 [source rows]: each source row's number of response
    tokens.
    """

    place: Tensor
    lengths: Tensor

    def take(self, index: Tensor) -> FollowUpTokens:
        """Keep only the follow-up prompts at ``index``."""
        return FollowUpTokens(self.place[index], self.lengths)


@dataclass(frozen=True, eq=False)
class Axis:
    """The rows of a batch. Batches only have the same rows if they share the same Axis object."""

    # int64 [rows, 2 or more], the path of each row: (position in the data stream, sample number). Each `ask`
    # or join adds two numbers: the number of the group along the new axis, and the row's number within the
    # group. Seeds, groups and order follow from the path.
    keys: Tensor
    parent: Axis | None = None  # the axis that these rows were made from
    index: Tensor | None = None  # int64 [rows]: the row of ``parent`` that each row was made from
    grouped: bool = False  # True: rows whose keys differ only in the last number form a group
    # how the rows were made from the parent: unchanged, sampled, as follow-up prompts, with encoded text, joined
    # into groups with other rows of the same prompts, or not at all, because the call that makes them isn't due
    step: Literal["taken", "sampled", "asked", "encoded", "joined", "unmade"] = "taken"
    cut: FollowUpTokens | None = None  # set for follow-up prompts at single tokens: which tokens

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def slots(self) -> Tensor:
        """Each row's group, int64 [rows]. Groups are numbered from 0 along the axis."""
        if len(self) == 0:
            return torch.zeros(0, dtype=torch.int64)
        return starts(self.keys).long().cumsum(0) - 1

    @functools.cached_property
    def heads(self) -> Tensor:
        """The index of each group's first row, int64 [groups]."""
        return torch.searchsorted(self.slots, torch.arange(self.groups))

    @property
    def group_numbers(self) -> Tensor:
        """The values of the column ``group``, int64 [rows].

        Samples of a prompt have the prompt's position in the data stream. Follow-up prompts and joined rows
        have the number of their group along the axis.
        """
        return self.keys[:, -2].clone()

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.slots[-1]) + 1 if len(self) else 0

    @staticmethod
    def fresh(rows: int, start: int = 0) -> Axis:
        """Make an axis of ``rows`` prompts at consecutive positions of the data stream, from ``start`` on."""
        return Axis(torch.stack([torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.int64)], 1))

    def take(self, index: Tensor) -> Axis:
        """Make an axis of the rows at ``index``, int64 [rows kept]."""
        return Axis(self.keys[index], self, index, self.grouped)

    def repeat(self, times: int) -> Axis:
        """Make an axis with ``times`` samples of each row, next to each other."""
        index = torch.arange(len(self)).repeat_interleave(times)
        sample = torch.arange(times).repeat(len(self)) + self.keys[index, -1] * times
        return Axis(torch.cat([self.keys[index, :-1], sample[:, None]], 1), self, index, True, "sampled")

    def unmade(self) -> Axis:
        """Make an axis without rows, for the rows of a call that isn't due in this iteration."""
        none = torch.zeros(0, dtype=torch.int64)
        return Axis(self.keys[none], self, none, self.grouped, "unmade")

    @property
    def made(self) -> bool:
        """False for an axis from ``unmade``, and for axes made from it."""
        return all(step.step != "unmade" for step in self.line)

    def ask(self, index: Tensor, cut: FollowUpTokens | None = None) -> Axis:
        """Make an axis of follow-up prompts, where prompt i comes from row ``index[i]``.

        ``cut``: where the prompts continue the rows' responses, or None if they don't.
        """
        number = torch.arange(len(index))
        keys = torch.cat([self.keys[index], torch.stack([number, torch.zeros_like(number)], 1)], 1)
        return Axis(keys, self, index, False, "asked", cut)

    def encode(self, index: Tensor) -> Axis:
        """Make an axis of rows with encoded responses, where row i has the prompt of row ``index[i]``.

        Groups stay. Rows without groups become groups of one row each, as with one sample of each row.
        """
        return Axis(self.keys[index], self, index, True, "encoded")

    def cut_of(self, other: Axis) -> Axis | None:
        """Find the follow-up prompts, on this axis or an ancestor, that continue responses of ``other``.

        The responses may also belong to an axis that ``other`` was selected from. Returns None if there are
        no such prompts.
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
        """Make an axis with the rows of all parts, one part after another.

        Groups of different parts stay separate, and are numbered from 0 along the new axis.
        """
        paths = stacked([part.keys for part in parts])
        before = itertools.accumulate((part.groups for part in parts), initial=0)
        number = torch.cat([part.slots + start for part, start in zip(parts, before, strict=False)])
        within = torch.cat([torch.arange(len(part)) - part.heads[part.slots] for part in parts])
        return Axis(
            torch.cat([paths, torch.stack([number, within], 1)], 1),
            grouped=all(part.grouped for part in parts),
        )

    @staticmethod
    def join_groups(parts: Sequence[Axis]) -> tuple[Axis, Tensor] | None:
        """Make an axis with the rows of all parts, where rows of the same prompt form a group.

        Groups are in the order of the prompts, and within a group the rows of earlier parts come first.
        Returns the axis, and int64 [rows]: for each of its rows, the row's number among the rows of all
        parts, one part after another. Returns None if the parts weren't made from the same prompts.
        """
        prompts = common_prompts(parts)
        if prompts is None:
            return None
        index, order = torch.cat([part.back_to(prompts) for part in parts]).sort(stable=True)
        paths = stacked([part.keys for part in parts])[order]
        _, number, sizes = torch.unique_consecutive(index, return_inverse=True, return_counts=True)
        within = torch.arange(len(index)) - (sizes.cumsum(0) - sizes)[number]
        keys = torch.cat([paths, torch.stack([number, within], 1)], 1)
        return Axis(keys, prompts, index, True, "joined"), order

    @property
    def line(self) -> Iterator[Axis]:
        """Yield this axis, its parent, its parent's parent, and so on."""
        step: Axis | None = self
        while step is not None:
            yield step
            step = step.parent

    def rows_of(self, other: Axis) -> Tensor | None:
        """For each row of ``other``, find the row of this axis that provides its values in a merge.

        Returns int64 [rows of other], with -1 for rows that get no value. Returns None if a row of ``other``
        would get several values, or if the axes are unrelated: neither was made from the other, and they have
        no common ancestor.
        """
        rows = self._common_origin(other)
        return None if rows is None else rows[0] if rows[1] is None else _through(rows[1], rows[2], rows[0])

    def groups_of(self, other: Axis) -> Tensor | None:
        """For each row of ``other``, find the group of this axis that provides its values in a merge.

        Returns int64 [rows of other], with groups numbered as in ``slots`` and -1 for rows that get no value.
        Returns None if a row of ``other`` would get values from several groups, or if the axes are unrelated.
        """
        rows = self._common_origin(other)
        if rows is None:
            return None
        return self.slots[rows[0]] if rows[1] is None else _through(rows[1][self.heads], rows[2], rows[0])

    def _common_origin(self, other: Axis) -> tuple[Tensor, Tensor | None, int] | None:
        """Find the nearest axis that both axes were made from, or return None if there is none.

        Returns three values: for each row of ``other``, the row of the origin it came from; the same for each
        row of this axis, or None if this axis is the origin; and the origin's number of rows.
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
        """For each row, return the row of ``origin`` it came from, int64 [rows].

        ``origin`` must be this axis or one of its ancestors.
        """
        index = torch.arange(len(self))
        for step in itertools.takewhile(lambda step: step is not origin, self.line):
            assert step.index is not None
            index = step.index[index]
        return index

    def took_from(self, origin: Axis) -> bool:
        """Return True if this axis is ``origin`` or was made from it only by selecting rows."""
        between = list(itertools.takewhile(lambda step: step is not origin, self.line))
        return (
            all(step.step == "taken" for step in between)
            and (between[-1].parent if between else self) is origin
        )


def common_prompts(parts: Sequence[Axis]) -> Axis | None:
    """Find the nearest axis without groups that all parts were made from, or return None if there is none."""
    others = [set(map(id, part.line)) for part in parts[1:]]
    return next(
        (step for step in parts[0].line if not step.grouped and all(id(step) in other for other in others)),
        None,
    )


def _through(origin: Tensor, rows: int, wanted: Tensor) -> Tensor | None:
    """Look up where each number in ``wanted`` occurs in ``origin``: int64 [wanted], -1 if it doesn't.

    All numbers are below ``rows``. Returns None if ``origin`` contains a number twice.
    """
    if len(torch.unique(origin)) < len(origin):
        return None
    return torch.full((rows,), -1, dtype=torch.int64).index_put_((origin,), torch.arange(len(origin)))[wanted]


def stacked(keys: Sequence[Tensor]) -> Tensor:
    """Concatenate the paths of several axes, int64 [all rows, longest path].

    Shorter paths are padded with zeros.
    """
    width = max(part.shape[1] for part in keys)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in keys])


def starts(keys: Tensor) -> Tensor:
    """Mark the first row of each group, given each row's path in ``keys``. Returns bool [rows].

    A new group starts wherever the second-to-last number of the path changes. The numbers before it may
    differ within a group, because joined rows keep their old paths.
    """
    first = torch.ones(len(keys), dtype=torch.bool)
    first[1:] = keys[1:, -2] != keys[:-1, -2]
    return first
