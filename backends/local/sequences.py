"""Rows laid out for a model: prompt and response in one sequence, padded on the right.

A causal model needs no attention mask for padding on the right: no position reads what stands after it. What
the model makes of the padding itself is never read. So rows without a mask use the fastest attention there
is, and positions count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch, ramp
from rlflow.training.loss_rows import token_counts


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses as rows of one tensor, and where in it the responses stand."""

    ids: Tensor  # int64 [rows, L]
    lengths: Tensor  # int64 [rows], tokens of each response
    targets: Tensor  # int64 [entries], the response tokens, flat
    # int64 [entries]: place in the flattened [rows × L] of the token before each response token
    before: Tensor
    last: Tensor  # int64 [rows]: place in it of each row's last token


def sequences(rows: Batch, device: torch.device) -> Sequences:
    """Lay out ``prompt_tokens`` and ``tokens``. Raises ValueError for an empty prompt: its first token has no
    prefix to be predicted from."""
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
    """Tokens of the longest prompt and response together; 0 without rows."""
    return max(token_counts(rows).tolist(), default=0)


def check_prompts(lengths: Tensor) -> None:
    """Raises ValueError where one of the prompts, of int64 [rows] tokens, is empty."""
    if len(lengths) and int(lengths.min()) == 0:
        raise ValueError(
            f"prompt_tokens: found an empty prompt in row {int(lengths.argmin())}, expected at least one "
            "token (for example the tokenizer's BOS token)"
        )
