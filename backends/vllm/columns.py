"""Sampled rows as columns, the same as the local backend's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column
from rlflow.author.columns import TABLE, Kind, Level
from rlflow.backends.vllm.engine import Row
from rlflow.data.spoken import completions
from rlflow.training.protocols import Sampling


def token_column(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Data:
    """Entries of each row as a column."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
    return Data(Kind(Level.TOKEN, str(dtype).removeprefix("torch.")), flat, lengths)


def batch_of(axis: Axis, rows: Sequence[Row], sampling: Sampling, eos: Sequence[int], tokenizer: Any) -> Batch:
    """tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group over ``axis``."""
    columns = {
        "tokens": token_column([row.tokens for row in rows], torch.int64),
        "mask": token_column([[True] * len(row.tokens) for row in rows], torch.bool),
        "sampled_logprobs": token_column([row.logprobs for row in rows]),
        "policy_version": token_column([row.versions for row in rows], torch.int64),
    }
    said = completions(tokenizer, [row.tokens for row in rows], eos, sampling.skip_special_tokens)
    columns |= {
        "completion": Data(Kind(Level.TEXT), tuple(said)),
        "finish": Data(Kind(Level.TEXT), tuple("stop" if row.stopped else "length" for row in rows)),
        "temperature": Data(TABLE["temperature"].kind, torch.full((len(rows),), sampling.temperature or 1.0)),
        "group": group_column(axis),
    }
    return Batch(axis, columns)
