"""Row accounting of an iteration: how many rows and tokens were sampled, and what happened to each row.

Every count of trained or dropped rows comes from this account. Each row has exactly one outcome; being
truncated, clipped or unscored is an attribute of a row, not an outcome. The outcomes add up to the rows that
were sampled, carried over from earlier iterations, drawn from a buffer, put in place of sampled rows by a
stage, or encoded from text. Tokens that a stage masks out of a trained row are counted separately, as dropped by
that stage.

Rows that are put into a buffer are counted under the buffer's name, in addition to their outcome. Over all
iterations, the rows that were put are those that the buffer still has and those that left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.author.axis import Axis

# Name of a column that a `repeat` body returns: True for rows whose tokens a stage replaced. Authors cannot
# read it.
REPLACED = "replaced by a stage"


LATER = ("placed", "stored")  # counts that an account without them omits


class RowOutcome(StrEnum):
    """The outcome of a sampled row."""

    # trained on by the named update; if there are several, by the first update of the role that sampled the
    # row
    TRAINED = "trained"
    READ = "read only"  # read by a baseline, a reward or a stage, but passed to no update
    LEFT_OUT = "left out"  # dropped by the named node, for the named cause
    SURPLUS = "surplus"  # kept by a `repeat` beyond the groups it needs, then dropped
    STALE = "stale"  # carried over until its weights were too old
    CARRIED = "carried on"  # carried over into a later iteration
    EVICTED = "evicted"  # left a buffer, for the named cause


class End(NamedTuple):
    """The outcome of a row, and the node that decided it.

    A dropped row also has a cause, and the setting that led to the cause.
    """

    fate: RowOutcome
    node: str = ""
    cause: str = ""
    setting: str = ""


class Count(NamedTuple):
    """Numbers of groups, rows and tokens."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0

    def plus(self, other: Count) -> Count:
        """Return the sum of both counts."""
        return Count(*(a + b for a, b in zip(self, other, strict=True)))

    @staticmethod
    def of(
        axis: Axis, lengths: Tensor | None, chosen: Tensor | None = None, elsewhere: Tensor | None = None
    ) -> Count:
        """Count the groups, rows and tokens of an axis.

        ``lengths``: int64 [rows], tokens per row. ``chosen``: bool [rows], the rows to count; None counts all
        rows. ``elsewhere``: bool [rows], rows already in another count, whose groups aren't counted again.
        """
        slots = axis.slots
        own = slots if chosen is None else slots[chosen]
        groups = own if elsewhere is None else own[~torch.isin(own, slots[elsewhere])]
        if lengths is not None and chosen is not None:
            lengths = lengths[chosen]
        return Count(len(set(groups.tolist())), len(own), 0 if lengths is None else int(lengths.sum()))


@dataclass
class RowAccount:
    """The row counts of an iteration, by the node that sampled the rows."""

    sampled: dict[str, Count] = field(default_factory=dict)  # all rows that the node sampled
    # rows of the node that earlier iterations carried over, or that the node drew from a buffer
    opened: dict[str, Count] = field(default_factory=dict)
    # rows that were not sampled, by node: a stage put them in place of sampled rows, or `encode` made them
    placed: dict[str, Count] = field(default_factory=dict)
    ends: dict[tuple[str, End], Count] = field(default_factory=dict)  # outcomes of the node's rows
    stored: dict[str, Count] = field(default_factory=dict)  # rows that were put into a buffer, by buffer

    def sample(self, source: str, count: Count) -> None:
        """Add rows that the node ``source`` sampled."""
        self.sampled[source] = self.sampled.get(source, Count()).plus(count)

    def open(self, source: str, count: Count) -> None:
        """Add carried-over rows, which the node ``source`` sampled in an earlier iteration."""
        self.opened[source] = self.opened.get(source, Count()).plus(count)

    def place(self, source: str, count: Count) -> None:
        """Add rows that the stage ``source`` put in place of sampled rows, or that it encoded from text."""
        self.placed[source] = self.placed.get(source, Count()).plus(count)

    def store(self, buffer: str, count: Count) -> None:
        """Add rows that were put into a buffer."""
        self.stored[buffer] = self.stored.get(buffer, Count()).plus(count)

    def end(self, source: str, end: End, count: Count) -> None:
        """Record ``count`` rows, or single tokens, as having ended with the outcome ``end``.

        ``source``: the node that sampled the rows, or the stage that put them in place of sampled rows.
        """
        if count.rows or count.tokens:
            self.ends[source, end] = self.ends.get((source, end), Count()).plus(count)

    def add(self, other: RowAccount) -> None:
        """Add all counts of another account to this account."""
        for source, count in other.sampled.items():
            self.sample(source, count)
        for source, count in other.opened.items():
            self.open(source, count)
        for source, count in other.placed.items():
            self.place(source, count)
        for source, count in other.stored.items():
            self.store(source, count)
        for (source, end), count in other.ends.items():
            self.end(source, end, count)

    def left(self, source: str) -> Count:
        """Return how many rows of ``source`` have no outcome yet. This is zero at the end of an iteration."""
        known = [count for (name, _), count in self.ends.items() if name == source]
        total = Count()
        for counts in (self.sampled, self.opened, self.placed):
            total = total.plus(counts.get(source, Count()))
        return Count(*(whole - sum(count[i] for count in known) for i, whole in enumerate(total)))

    def of(self, fate: RowOutcome, node: str = "") -> Count:
        """Return how many rows ended with the outcome ``fate``, decided by ``node``.

        If ``node`` is empty, count the rows of all nodes.
        """
        total = Count()
        for (_, end), count in self.ends.items():
            if end.fate is fate and node in ("", end.node):
                total = total.plus(count)
        return total

    @property
    def closes(self) -> bool:
        """True if every row and token has exactly one outcome.

        Groups aren't compared, because the rows of a group can have different outcomes.
        """
        return not any(
            self.left(source)[1:] != (0, 0) for source in {*self.sampled, *self.opened, *self.placed}
        )

    def as_json(self) -> dict[str, Any]:
        """Return the account as plain JSON values, sorted so that equal accounts give equal text."""
        ends = [
            {
                "source": source,
                **{name: text for name, text in end._asdict().items() if text},
                **count._asdict(),
            }
            for (source, end), count in sorted(self.ends.items())
        ]
        more = {name: _plain(counts) for name in LATER if (counts := getattr(self, name))}
        return {"sampled": _plain(self.sampled), "opened": _plain(self.opened), **more, "fates": ends}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RowAccount:
        """Rebuild an account from what ``as_json`` returned. Raises ValueError for any other values."""
        try:
            account = RowAccount(
                **{
                    which: {name: _count(count) for name, count in values.get(which, {}).items()}
                    for which in ("sampled", "opened", *LATER)
                }
            )
            for entry in values["fates"]:
                end = End(RowOutcome(entry["fate"]), *(str(entry.get(name, "")) for name in End._fields[1:]))
                account.end(str(entry["source"]), end, _count(entry))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a row account: {error}") from error
        return account


def _count(values: Mapping[str, Any]) -> Count:
    count = Count(*(values[name] for name in Count._fields))
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in count):
        raise ValueError(f"not counts: {count}")
    return count


def _plain(counts: Mapping[str, Count]) -> dict[str, dict[str, int]]:
    return {source: count._asdict() for source, count in sorted(counts.items())}
