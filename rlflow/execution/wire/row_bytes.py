"""Rows as bytes, with integers narrowed to int32 where they fit, and with the rank that each row was on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.execution.wire.column_wire import BatchFrame, unpack

Payload = NDArray[np.uint8]  # bytes that Ray passes without a copy
# names that no column of a flow can have
_RANK, _RANKS = "@rank", "@ranks"


def packed(batch: Batch, rows: Tensor | None = None) -> Payload:
    """Return a batch as bytes in the format of `rlflow.execution.wire.column_wire`.

    ``rows``: row indices, or None for all rows. Integers are written as int32 if they fit.
    """
    return BatchFrame(batch, rows, narrow=True).written().numpy()


def opened(payload: Payload) -> Batch:
    """Unpack bytes from ``packed``, and return the batch.

    Its tensors are views of the bytes, except for integers that were written as int32.
    """
    batch = unpack(payload.data)
    return Batch(batch.axis, {name: widened(data) for name, data in batch.data.items()})


def widened(data: Data) -> Data:
    """Return the column with its integers converted back to the dtype of its kind."""
    if (
        data.kind.dtype != "int64"
        or not isinstance(data.value, Tensor)
        or data.value.dtype is not torch.int32
    ):
        return data
    return replace(data, value=data.value.to(torch.int64))


@dataclass(frozen=True)
class RowRanks:
    """The rank of a pool that stores each row, saved with the rows so that they can return to it."""

    rank: Tensor  # int64 [rows]
    ranks: int  # number of ranks in the pool

    @staticmethod
    def of(split: Sequence[Tensor], rows: int) -> RowRanks:
        """Return the ranks of ``rows`` rows. ``split``: the row indices of each rank."""
        rank = torch.zeros(rows, dtype=torch.int64)
        for number, index in enumerate(split):
            rank[index] = number
        return RowRanks(rank, len(split))

    def split(self, ranks: int) -> list[Tensor] | None:
        """Return the row indices of each rank, or None if the pool now has another number of ranks."""
        if ranks != self.ranks:
            return None
        return [(self.rank == number).nonzero()[:, 0] for number in range(ranks)]

    def noted(self, batch: Batch) -> Batch:
        """Return the batch with these ranks as two more columns, which ``taken`` removes again."""
        columns = {
            _RANK: Data(Kind(Level.ROW, "int64"), self.rank),
            _RANKS: Data(Kind(Level.SCALAR, "int64"), torch.tensor(self.ranks)),
        }
        return Batch(batch.axis, batch.data | columns)

    @staticmethod
    def taken(batch: Batch) -> tuple[Batch, RowRanks | None]:
        """Return the batch without the columns of ``noted``, and the ranks in them, or None without them."""
        if _RANK not in batch:
            return batch, None
        ranks = RowRanks(batch.data[_RANK].value, int(batch.data[_RANKS].value))
        return batch.drop(_RANK, _RANKS), ranks
