"""Rows that end one after another, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def chunked(ended: Iterable[Tensor], rows: int, chunks: int) -> Iterator[Tensor]:
    """``chunks`` chunks of ``rows`` rows in the order in which they end, sizes differing by at most one, each
    as soon as its last row has
    ended: int64, ascending. ``ended``: rows, in any portions. With fewer rows than chunks the last ones are
    empty. Raises ValueError where not all rows end."""
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
