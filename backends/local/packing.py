"""Lay out rows without padding: all tokens are in one sequence, and the common prefix of prompts is there
only once.

All layers except attention process each token separately, so they process exactly these tokens. Attention is
computed for each ``Block`` (attention.py).
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
    """Adjacent rows of equal length in the packed sequence: ``count`` rows of ``length`` tokens each. The
    first row begins at ``start``."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        """The place after the last token of the run."""
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Block:
    """The tokens of one family in the packed sequence: first the ``shared`` common tokens (possibly none)
    from ``start`` on, then the other tokens of each row."""

    start: int
    shared: int
    runs: tuple[Run, ...]

    @property
    def rows(self) -> slice:
        """The places of all tokens of the block after the common ones."""
        return slice(self.start + self.shared, self.runs[-1].end)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row, including the common ones."""
        return self.shared + self.runs[0].length


@dataclass(frozen=True)
class PackedRows(Sequences):
    """``Sequences`` with all rows in one sequence: ``ids`` is int64 [1, tokens], and ``before`` and ``last``
    are places in it."""

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
    """Return (block, rows in the order of the block) for a family. The block begins at ``start``, and its
    longest rows come first. whole: the number of tokens of each row."""
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
