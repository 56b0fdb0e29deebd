"""Lay out rows for a model, with each row's prompt and response in one sequence that is padded on the right.

A causal model needs no mask for padding on the right, because no token reads later ones and the output at
padding is never read. Without a mask, attention is fastest, and positions count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch, ramp
from rlflow.training.loss_rows import token_counts


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses in one tensor, and the positions of the response tokens."""

    ids: Tensor  # int64 [rows, L]
    lengths: Tensor  # int64 [rows], tokens of each response
    targets: Tensor  # int64 [entries], the response tokens, flat
    # int64 [entries]: place of the token before each response token, in the flattened [rows × L]
    before: Tensor
    last: Tensor  # int64 [rows]: place of each row's last token, in the flattened [rows × L]


def sequences(rows: Batch, device: torch.device) -> Sequences:
    """Lay out the columns ``prompt_tokens`` and ``tokens`` of the rows with padding. Raises ValueError if a
    prompt is empty, because nothing would predict its first response token."""
    prompt, response = rows.data["prompt_tokens"], rows.data["tokens"]
    start, lengths = prompt.lengths, response.lengths
    check_prompts(start)
    width = longest_row(rows)
    place = torch.arange(width)
    ids = torch.zeros(len(start), width, dtype=torch.int64)
    ids[place < start[:, None]] = prompt.value
    ids[(place >= start[:, None]) & (place < (start + lengths)[:, None])] = response.value
    first = torch.arange(len(start)) * width
    before = (first + start - 1).repeat_interleave(lengths) + ramp(lengths)
    moved = (tensor.to(device) for tensor in (ids, response.value, before, first + start + lengths - 1))
    ids, targets, before, last = moved
    return Sequences(ids, lengths, targets, before, last)


def longest_row(rows: Batch) -> int:
    """Return the length of the longest row, prompt and response together, in tokens, or 0 if there are no
    rows."""
    return max(token_counts(rows).tolist(), default=0)


def check_prompts(lengths: Tensor) -> None:
    """Raise ValueError if a prompt is empty. ``lengths`` has the length of each prompt in tokens, int64
    [rows]."""
    if len(lengths) and int(lengths.min()) == 0:
        raise ValueError(
            f"prompt_tokens: found an empty prompt in row {int(lengths.argmin())}, expected at least one "
            "token (for example the tokenizer's BOS token)"
        )
