"""Split sampled rows into chunks, in the order in which they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def chunked(ended: Iterable[Tensor], rows: int, chunks: int) -> Iterator[Tensor]:
    """Split ``rows`` rows into ``chunks`` chunks, and yield each chunk's row indices as soon as all its rows
    have ended.

    ended: yields int64 tensors with the indices of the rows that have ended since the last one. Rows that end
    earlier go into earlier chunks, and indices are ascending within a chunk. Chunk sizes differ by at most
    one; if there are fewer rows than chunks, the last chunks are empty. Raises ValueError if ``ended`` stops
    before all rows have ended.
    """
    waiting = torch.zeros(0, dtype=torch.int64)
    sizes = [len(part) for part in torch.arange(rows).tensor_split(chunks)][::-1]
    for portion in ended:
        waiting = torch.cat([waiting, portion])
        while sizes and len(waiting) >= sizes[-1]:
            size = sizes.pop()
            yield waiting[:size].sort().values
            waiting = waiting[size:]
    if len(waiting) != sum(sizes):
        raise ValueError(f"found {rows - sum(sizes) + len(waiting)} rows that ended, expected {rows}")
    yield from (waiting[:0] for _ in sizes)
