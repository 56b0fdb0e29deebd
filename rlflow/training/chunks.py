"""Divide rows into chunks by the order in which the rows end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def chunked(ended: Iterable[Tensor], rows: int, chunks: int) -> Iterator[Tensor]:
    """Yield the row numbers of each of ``chunks`` chunks, as soon as the chunk's last row has ended.

    ended: the numbers of rows that have ended, int64, in portions of any size. Rows that end earlier are in
    earlier chunks; within a chunk, the int64 row numbers ascend. Chunk sizes differ by at most one. If there
    are fewer rows than chunks, the last chunks are empty. Raises ValueError if not all ``rows`` rows end.
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
