"""Divide rows into chunks in the order in which they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def chunked(ended: Iterable[Tensor], rows: int, chunks: int) -> Iterator[Tensor]:
    """Yield the rows in ``chunks`` chunks by end time, each chunk as soon as its last row has ended.

    ended: int64 numbers of rows that have ended, in portions of any size. A chunk has int64 row numbers in
    ascending order. Chunk sizes differ by at most one. With fewer rows than chunks, the last chunks are
    empty. Raises ValueError if not all ``rows`` rows end.
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
