"""The numbers of a table by key, and how the writes of an iteration change them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlflow.author.memory import Reducer, Table

# a part is merged into the one before it unless that one has more than this many times as many keys, so a
# table has few parts, and its large ones rarely change
MERGED = 2


@dataclass(frozen=True, eq=False)
class TablePart:
    """The numbers that some iterations changed, as they were after the last of these iterations."""

    first: int  # the first of the iterations
    last: int
    keys: Tensor  # int64 [keys], ascending
    values: Tensor  # float32 [keys, columns]


@dataclass(frozen=True, eq=False)
class KeptTable:
    """A table before an iteration. It is made of parts, from the oldest to the newest.

    Checkpoints store each part in a file of its own, so that only new parts need to be written.
    """

    spec: Table
    lag: int = 0  # how many iterations a read may be behind (`--staleness`); younger parts are not merged
    parts: tuple[TablePart, ...] = ()

    def __len__(self) -> int:
        return self._size

    @functools.cached_property
    def _size(self) -> int:
        """The number of keys that were ever written."""
        return len(torch.unique(torch.cat([_NO_KEYS, *(part.keys for part in self.parts)])))

    @property
    def defaults(self) -> Tensor:
        """The numbers of a key that was never written, float32 [columns]."""
        return torch.tensor([default for _, default in self.spec.columns], dtype=torch.float32)

    def before(self, iteration: int) -> KeptTable:
        """Return the table as it was before ``iteration``, without what later iterations wrote.

        Iterations that are more than ``lag`` back can't be told apart any more.
        """
        kept = tuple(part for part in self.parts if part.last < iteration)
        return self if len(kept) == len(self.parts) else replace(self, parts=kept)

    def read(self, keys: Tensor) -> dict[str, Tensor]:
        """Return the table's columns for these keys, int64 [rows], each as float32 [rows]."""
        values, _ = self._looked_up(keys)
        return {name: values[:, i].contiguous() for i, (name, _) in enumerate(self.spec.columns)}

    def written(
        self,
        iteration: int,
        keys: Tensor,
        columns: Mapping[str, Tensor],
        reducers: Mapping[str, Reducer],
        paths: Tensor,
    ) -> KeptTable:
        """Return the table after ``iteration`` has written these rows.

        ``keys``: int64 [rows]. ``columns``: the numbers of each row by column, [rows]; NaN writes nothing.
        ``paths``: int64 [rows, 2 or more], the path of each row (see ``Axis.keys``). Rows are combined in the
        order of place in the data, sample number and order on the axis, so the result doesn't depend on
        where rows are stored. Raises ValueError if ``set`` gets different numbers for one key, or if float32
        can't hold a number.
        """
        order = _in_order(paths)
        changed, slots = torch.unique(keys[order], return_inverse=True)
        values, known_keys = self._looked_up(changed)
        touched = torch.zeros(len(changed), dtype=torch.bool)
        for place, (name, _) in enumerate(self.spec.columns):
            if name in columns:
                fresh = columns[name].double()[order]
                known = ~fresh.isnan()
                touched[slots[known]] = True
                values[:, place] = _reduced(
                    reducers[name], values[:, place].double(), slots[known], fresh[known], name, changed
                ).float()
                _check_finite(name, values[:, place], changed)
        part = TablePart(iteration, iteration, changed[touched], values[touched])
        if not len(part.keys):
            return self
        return self._with(part, new=int((touched & ~known_keys).sum()))

    def _looked_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the keys, float32 [keys, columns], and which were ever written, bool [keys].

        The other keys have the defaults.
        """
        values, known = self.defaults.repeat(len(keys), 1), torch.zeros(len(keys), dtype=torch.bool)
        for part in self.parts:
            place = torch.searchsorted(part.keys, keys).clamp(max=len(part.keys) - 1)
            there = part.keys[place] == keys
            values[there] = part.values[place[there]]
            known |= there
        return values, known

    def _with(self, part: TablePart, new: int) -> KeptTable:
        """Return the table with one more part, which has ``new`` keys that no other part has.

        Parts that no read can tell apart any more are merged, unless the older one is much larger.
        """
        parts = (*self.parts, part)
        old = [each for each in parts if each.last < part.last - self.lag]
        young = parts[len(old) :]
        while len(old) > 1 and len(old[-2].keys) <= MERGED * len(old[-1].keys):
            old[-2:] = [_merged(old[-2], old[-1])]
        table = replace(self, parts=(*old, *young))
        table.__dict__["_size"] = len(self) + new
        return table


_NO_KEYS = torch.zeros(0, dtype=torch.int64)


def _check_finite(name: str, values: Tensor, keys: Tensor) -> None:
    """Raise ValueError if a column, [keys], has a number that float32 can't hold."""
    wrong = (~values.isfinite()).nonzero()[:, 0]
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"'{name}' of key {int(keys[row])} would become {float(values[row])}, expected a number that float32 "
            "can hold; NaN writes nothing"
        )


def _in_order(paths: Tensor) -> Tensor:
    """Return the order of the rows by place in the data and sample number, int64 [rows]. Ties keep theirs."""
    return torch.from_numpy(np.lexsort((paths[:, 1].numpy(), paths[:, 0].numpy())))


def _merged(older: TablePart, newer: TablePart) -> TablePart:
    """Merge two parts. The numbers of ``newer`` count for keys that are in both."""
    keys = torch.unique(torch.cat([older.keys, newer.keys]))
    values = torch.empty(len(keys), older.values.shape[1])
    for part in (older, newer):
        values[torch.searchsorted(keys, part.keys)] = part.values
    return TablePart(older.first, newer.last, keys, values)


def _reduced(reducer: Reducer, old: Tensor, slots: Tensor, fresh: Tensor, name: str, keys: Tensor) -> Tensor:
    """Return the new numbers of a column, float64 [keys]. Keys without rows keep their old number.

    ``old``: float64 [keys]. ``slots``: the key of each row, as an index, in the order in which rows count.
    ``fresh``: float64 [rows].
    """
    own, rows = old.clone(), torch.bincount(slots, minlength=len(old))
    written = rows > 0
    match reducer.rule:
        case "add":
            return own.index_add_(0, slots, fresh)
        case "max" | "min":
            return own.scatter_reduce_(0, slots, fresh, f"a{reducer.rule}")
        case "ema":
            mean = torch.zeros_like(old).index_add_(0, slots, fresh) / rows.clamp(min=1)
            return torch.where(written, reducer.rate * old + (1 - reducer.rate) * mean, old)
    last = torch.zeros_like(rows).scatter_reduce_(0, slots, torch.arange(len(slots)), "amax")
    own[written] = fresh[last[written]]
    if reducer.rule == "set" and (differs := (own[slots] != fresh).nonzero()[:, 0]).numel():
        row = int(differs[0])
        raise ValueError(
            f"'{name}' is set to {fresh[row]:g} and to {own[slots[row]]:g} for key {int(keys[slots[row]])}, "
            "expected one number for all rows of a key"
        )
    return own
