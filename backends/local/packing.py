"""Lay out rows without padding, in a single sequence that contains each common prompt prefix only once.

All layers except attention process each token on its own, so they need no more than these tokens. Attention
is computed for each ``Block`` (attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch, ramp
from rlflow.backends.local.sequences import Sequences, check_prompts
from rlflow.training.prefixes import Family, families


@dataclass(frozen=True)
class Run:
    """``count`` adjacent rows of ``length`` tokens each in the packed sequence, beginning at ``start``."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        """The position after the run's last token."""
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Block:
    """The tokens of one family in the packed sequence: the ``shared`` common tokens (possibly none) beginning
    at ``start``, followed by the rest of each row."""

    start: int
    shared: int
    runs: tuple[Run, ...]

    @property
    def rows(self) -> slice:
        """The positions of the block's tokens after the common ones."""
        return slice(self.start + self.shared, self.runs[-1].end)

    @property
    def longest(self) -> int:
        """The length of the longest row in tokens, including the common ones."""
        return self.shared + self.runs[0].length


@dataclass(frozen=True)
class PackedRows(Sequences):
    """``Sequences`` with all rows in a single sequence. ``ids`` is int64 [1, tokens], and ``before`` and
    ``last`` are positions in it."""

    positions: Tensor  # int64 [1, tokens]: the place of each token in its own row
    blocks: tuple[Block, ...]


def packed(rows: Batch, device: torch.device) -> PackedRows:
    """Lay out the columns ``prompt_tokens`` and ``tokens`` of the rows without padding. Raises ValueError if
    a prompt is empty."""
    prompt, response = rows.data["prompt_tokens"], rows.data["tokens"]
    start, lengths = prompt.lengths, response.lengths
    check_prompts(start)
    whole = [torch.cat(parts) for parts in zip(prompt.split(), response.split(), strict=True)]
    pieces, positions, blocks, place = [], [], [], torch.zeros(len(start), dtype=torch.int64)
    for family in families(prompt):
        block, order = _block(family, [len(row) for row in whole], blocks[-1].runs[-1].end if blocks else 0)
        blocks.append(block)
        pieces += [whole[order[0]][: family.shared], *(whole[row][family.shared :] for row in order)]
        positions += [
            torch.arange(family.shared),
            *(torch.arange(family.shared, len(whole[row])) for row in order),
        ]
        place[torch.tensor(order)] = (
            torch.cat([run.start + run.length * torch.arange(run.count) for run in block.runs])
            - family.shared
        )
    empty = [torch.zeros(0, dtype=torch.int64)]
    before = (place + start - 1).repeat_interleave(lengths) + ramp(lengths)
    laid = (
        torch.cat(pieces or empty)[None],
        response.value,
        before,
        place + start + lengths - 1,
        torch.cat(positions or empty)[None],
    )
    ids, targets, before, last, positions_ = (tensor.to(device) for tensor in laid)
    return PackedRows(ids, lengths, targets, before, last, positions_, tuple(blocks))


def _block(family: Family, whole: list[int], start: int) -> tuple[Block, list[int]]:
    """Return a family's block, which begins at ``start`` with its longest rows first, and the rows in this
    order. ``whole`` is the length of each row in tokens."""
    order = sorted(family.rows, key=lambda row: -whole[row])
    return Block(
        start,
        family.shared,
        tuple(_runs([whole[row] - family.shared for row in order], start + family.shared)),
    ), order


def _runs(lengths: list[int], start: int) -> Iterator[Run]:
    for length in dict.fromkeys(lengths):
        run = Run(start, lengths.count(length), length)
        yield run
        start = run.end
